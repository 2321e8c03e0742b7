"""Reward functions and the parts of the reward agent.

The way of one request, from ``submit`` to ``collect``; each line names the function and its file::

    RewardAgent.submit              reward_agent.py    returns a ticket at once
      Steps.check, Steps.add        steps.py           a Request for each row, by group
    RewardAgent._admit              reward_agent.py    on the next turns of the event loop, some rows at a time
      Jobs.admit                    jobs.py            a ScoringJob, or the answer that the ledger has
      Scorer.score                  scorer.py          NEW -> QUEUED
        EndpointQueue.push          limits/queues.py
    Limiter.fill                    limits/queues.py   whenever a slot or a rate allows one more call
      RewardAgent._start            reward_agent.py
        Scorer.start                scorer.py          QUEUED -> RUNNING
          Calls.start               ../usercode/calls.py   runs the user's function

    the function returned, raised an error, or timed out
      Scorer._on_done               scorer.py          RUNNING -> DONE; or -> BACKOFF -> QUEUED for another try
      Scorer._on_freed              scorer.py
        Limiter.release             limits/queues.py   frees the slot, and adapts the limit after 429 or a time-out
      RewardAgent._on_outcome       reward_agent.py    Scored or Failed, for each request of the job
        Steps.scored, Steps.failed  steps.py           the failure rule; OPEN -> SCORED, FAILED or CANCELLED
        GroupCalls.finish           groups.py          for the last request of a group: post_process_scores
        Steps.arrive                steps.py           wakes the waiter that has its groups

    RewardAgent.collect             reward_agent.py    Steps.collect (steps.py) waits, and returns the rewards

States and their allowed changes are in requests.py.
"""
