"""Reward functions and the parts of the reward agent.

The way of one request, from ``submit`` to ``collect``; each line names the function and its file::

    RewardAgent.submit              ../reward_agent.py  returns a ticket at once
      Steps.add                     steps.py            a Request for each row, by group
    RewardAgent._admit              ../reward_agent.py  a Job, or the answer that the ledger has
    RewardAgent._run_job            ../reward_agent.py  the life of a job:
      Slots.acquire                 slots.py            waits for a slot: oldest step first, within rates and pauses
      RewardAgent._try, _call       ../reward_agent.py  calls the user's function, with a second call if it is slow
        Calls.run                   ../usercode/calls.py    as a task or in a thread, under a time-out
        Slots.release               slots.py            frees the slot, and adapts the limit after 429 or a time-out
      Retry.again, Retry.wait_s     retry.py            after an error: another try?
      RewardAgent._finish_job, _fail_job ../reward_agent.py  for each request of the job
        Steps.scored, Steps.failed  steps.py            the failure rule (failure.py)
    RewardAgent._post_process_group ../reward_agent.py  after the last request of a group: post_process_scores
      Steps.arrive                  steps.py            wakes the waiters in turn, while the first has its groups
    RewardAgent.collect             ../reward_agent.py  Steps.collect (steps.py) waited, and returns the rewards
"""
