"""The command line: run, show, plan and the others. Wrong input is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import dataflow
from dataflow.commands.ending import act, one_line
from dataflow.errors import ConfigError, Interrupted
from dataflow.files import written
from dataflow.system.stopping import stopping
from dataflow.system.supervisor import report

if TYPE_CHECKING:
    from dataflow.running.reporting.progress import Progress
    from dataflow.running.session import Session

_FILES = (".py", ".yaml", ".yml")
"""Ends of the names of what can be run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; a run of its own process's command line gets a supervisor (:mod:`dataflow.system.supervisor`).

    Args:
        arguments: of this process if None.

    Returns:
        The exit code: 0, 1 (the run failed), 2 (wrong input), or 128 and the number of the signal that stopped it:
        130 for Ctrl-C, 143 for SIGTERM, 129 for a terminal that was closed.
    """
    parser, own = make_parser(), arguments is None
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if own and "_ARGCOMPLETE" in os.environ:  # a shell asks which words may stand at the cursor
        from argcomplete import autocomplete

        autocomplete(parser, always_complete_options=False)
    # Options may come between key=value arguments, which argparse alone does not accept.
    options, rest = parser.parse_known_args(arguments)
    takes_more = getattr(options, "overrides", getattr(options, "runs", None))
    if rest and (takes_more is None or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}; keys are written without dashes, such as steps=5")
    if rest:
        takes_more += rest
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    if own and _trains(options):
        from dataflow.system.supervisor import can_supervise, supervise

        if can_supervise():
            return supervise(lambda: act(options), _finish_killed)
    return act(options)


def _finish_killed(directory: Path, status: str, steps: int | None) -> str:
    from dataflow.running.record import finish_killed  # what it imports, a run that ends itself never needs

    return finish_killed(directory, status, steps)


def _trains(options: argparse.Namespace) -> bool:
    """Whether a command runs a pipeline."""
    if options.command == "compare":
        return bool(options.runs[0].endswith(_FILES))
    if options.command == "run":
        return not options.keys and not is_dry(options.overrides)[0]
    return bool(options.command == "resume")


class _Parser(argparse.ArgumentParser):
    """Prints errors in one line, without the usage, like every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{one_line(message)}; see '{self.prog} -h'.\n")


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands, which the documentation prints, too."""
    parser = _Parser(
        prog="dataflow",
        description="Schedules RL post-training so that slow rewards hide behind GPU work.",
        epilog="example: dataflow run pipelines/gsm8k_grpo.py policy=mini-batch steps=5",
    )
    version = f"dataflow {dataflow.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version, and stop")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, act: Callable[[argparse.Namespace], int], text: str, example: str) -> Callable[..., Any]:
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example: dataflow {name} {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(act=act)
        return command.add_argument

    keys: dict[str, Any] = {"nargs": "*", "metavar": "key=value"}
    flag: dict[str, Any] = {"action": "store_true"}
    run_help = "a run's directory"

    option = add("run", _run, "Trains a pipeline.", "pipelines/gsm8k_grpo.py policy=mini-batch steps=5")
    option("pipeline", nargs="?", metavar="PIPELINE.py", help="or a recipe, or the config.yaml of a run")
    option("overrides", help="configuration, --keys lists them; dry=true only checks everything", **keys)
    option("--keys", help="list every key with its default, and stop", **flag)
    option("--json", help="print the summary as JSON", **flag)
    option("--quiet", help="no progress", **flag)

    option = add("resume", _resume, "Resumes a run from its last whole checkpoint.", "runs/gsm8k_grpo-both-1 steps=60")
    option("run", metavar="RUN", help=run_help)
    option("overrides", help="what may change, such as steps=60", **keys)
    option("--json", help="print the summary as JSON", **flag)
    option("--quiet", help="no progress", **flag)

    text = "Writes the model of a run's checkpoint as a Hugging Face directory."
    option = add("export", _export, text, "runs/gsm8k_grpo-both-1 -o my-model")
    option("run", metavar="RUN", help=run_help)
    option("overrides", nargs="*", metavar="step=N", help="of which step; the newest by default")
    option("-o", dest="out", metavar="DIR", help="directory to make; RUN/model by default")
    option("--adapter", help="the LoRA adapter alone, which is merged otherwise", **flag)

    text = "Writes a project of your own: pipeline, reward, configuration, README and tests."
    option = add("init", _init, text, "my-project")
    option("directory", metavar="DIR", help="directory to write it to")

    text = "Says what is installed and what this machine has, and the fix of each problem."
    option = add("doctor", _doctor, text, "--json")
    option("--json", help="print it as JSON", **flag)

    text = "Shows the stages of a pipeline, or the graph unrolled over steps=N."
    option = add("show", _show, text, "pipelines/gsm8k_grpo.py policy=both steps=2")
    option("pipeline", metavar="PIPELINE.py")
    option("overrides", **keys)
    option("-o", dest="out", metavar="FILE.mmd|.svg|.png", help="draw it")
    option("--costs", metavar="RUN", help="a run whose stage times say what the critical path is")
    option("--json", help="print nodes and edges as JSON", **flag)

    text = "Predicts every policy from a run, a verl log or costs written by hand (costs.yaml)."
    option = add("plan", _plan, text, "runs/gsm8k_grpo-baseline-1 sweep=reward.concurrency:16:256 -o plan.png")
    text = "a run's directory, a verl log (console, jsonl, CSV, TensorBoard), a .yaml"
    option("source", nargs="?", metavar="SOURCE", help=text)
    option("overrides", help="what SOURCE does not hold, and what to change; --keys lists them", **keys)
    option("-o", dest="out", metavar="FILE.png|.svg|.html", help="draw it")
    option("--keys", help="list every key with its default, and stop", **flag)
    option("--json", help="print the plan as JSON", **flag)

    option = add("timeline", _timeline, "Shows one run's overlap.", "runs/gsm8k_grpo-both-1 -o timeline.html")
    option("run", metavar="RUN", help="a run's directory, or its trace.json")
    option("-o", dest="out", metavar="FILE.html|.png|.svg|.txt", help="draw it")
    option("--json", help="print the numbers as JSON", **flag)

    text = "Shows a run's prompts and responses, with scores and the judge's explanations."
    option = add("samples", _samples, text, "runs/gsm8k_grpo-both-1 step=12 sort=-latency where='score<0.5'")
    option("run", metavar="RUN", help=run_help)
    option("overrides", help="step, val, where, sort, most", **keys)
    option("-o", dest="out", metavar="FILE.html|.parquet", help="write the samples of all steps there")
    option("--json", help="print them as JSON", **flag)

    text = "Shows several runs on one time axis; given a pipeline, runs all four policies."
    option = add("compare", _compare, text, "runs/a runs/b -o compare.html")
    option("runs", nargs="+", metavar="RUN", help="run directories, or PIPELINE.py or a recipe, key=value ...")
    option("-o", dest="out", metavar="FILE.html|.png|.svg", help="draw them; .html to look around in")
    option("--json", help="print the table as JSON", **flag)

    text = "Turns a launch of verl into this project's overrides; runs nothing."
    option = add("import-verl", _import_verl, text, "run_qwen3_8b.sh -o run.sh")
    text = "a script or a resolved .yaml of verl (then key=value of verl), or python -m verl.trainer.main_ppo ..."
    option("words", nargs=argparse.REMAINDER, metavar="LAUNCH", help=text)
    option("-o", dest="out", metavar="FILE", help="write the new script there")
    option("--keys", help="list verl's keys and ours, and stop", **flag)
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.keys:
        from dataflow.config.loading.saved import load
        from dataflow.config.run import RunConfig, describe

        print(describe(load(options.pipeline, [])[0].Config if options.pipeline else RunConfig))
        return 0
    if options.pipeline is None:
        raise ConfigError("run: give a PIPELINE.py, such as pipelines/gsm8k_grpo.py.")
    dry, overrides = is_dry(options.overrides)
    progress = None if dry else _starting(options.pipeline, options)
    from dataflow.config.loading.saved import load
    from dataflow.running.session import Session, prepare_logging

    prepare_logging()
    if progress is None:
        from dataflow.running.dry import dry_run

        return _told(dry_run(partial(load, options.pipeline), overrides), options.json)
    module, config = load(options.pipeline, overrides)
    from dataflow.running.resume import Complete, began

    session = began(module, config, overrides, progress, Session)
    if isinstance(session, Complete):
        print(json.dumps(session.summary, indent=1) if options.json else f"{session.words}.")
        return 0
    return _train(session, options)


def is_dry(arguments: Sequence[str]) -> tuple[bool, list[str]]:
    """Returns whether ``dry=true`` is among ``key=value`` arguments, and the others."""
    others = [text for text in arguments if text.replace(" ", "").lower() not in ("dry=true", "dry=false")]
    return any(text.replace(" ", "").lower() == "dry=true" for text in arguments), others


def _told(findings: Sequence[Any], as_json: bool) -> int:
    """Prints what checks found; returns the exit code, 2 for a problem."""
    from dataflow.commands.doctor import table

    print(json.dumps([asdict(each) for each in findings], indent=1) if as_json else table(findings))
    return 2 if any(each.state == "problem" for each in findings) else 0


def _starting(what: str, options: argparse.Namespace) -> Progress:
    """Says on a terminal what starts, before the imports that take a second; returns what shows the rest of the run."""
    began = time.monotonic()
    if sys.stderr.isatty() and not options.quiet:  # elsewhere, wrong input is answered by one line
        print(f"starting {what}", file=sys.stderr, flush=True)
    from dataflow.running.reporting.progress import Progress

    return Progress(quiet=options.quiet, began=began)


def _resume(options: argparse.Namespace) -> int:
    progress = _starting(options.run, options)
    from dataflow.running.resume import resumed
    from dataflow.running.session import prepare_logging

    prepare_logging()
    return _train(resumed(Path(options.run), options.overrides, progress), options)


def _train(session: Session, options: argparse.Namespace) -> int:
    from dataflow.running.reporting.pages import draw_run
    from dataflow.running.reporting.progress import end_table

    summary = session.run()
    page = session.directory / "timeline.html"
    try:
        if stopping.received is not None:  # while it was closing
            raise KeyboardInterrupt
        with written("timeline", page):
            draw_run(session.directory)
    except KeyboardInterrupt:
        command = f"dataflow timeline {session.directory} -o {page}"
        raise Interrupted(f"the run is finished, its timeline is not drawn: '{command}' draws it") from None
    if options.json:
        print(json.dumps(summary, indent=1))
        return 0
    print(end_table(summary))
    print(f"timeline: {page}")
    print(f"trace:    {session.directory / 'trace.json'} (opens in https://ui.perfetto.dev)")
    return 0


def _export(options: argparse.Namespace) -> int:
    from dataflow.running.saving.export import export, step_of

    out = Path(options.out) if options.out else None
    print(export(Path(options.run), out, step_of(options.overrides), options.adapter))
    return 0


def _init(options: argparse.Namespace) -> int:
    from dataflow.commands.init import init

    return init(options.directory)


def _doctor(options: argparse.Namespace) -> int:
    from dataflow.commands.doctor import checks
    from dataflow.running.preparing.check import collect

    return _told(list(collect(checks())), options.json)


def _show(options: argparse.Namespace) -> int:
    from dataflow.commands.show import show

    return show(options)


def _plan(options: argparse.Namespace) -> int:
    if options.keys:
        from dataflow.config.keys.overrides import describe
        from dataflow.planning.config import PlanConfig

        print(describe(PlanConfig))
        return 0
    if options.source is None:
        raise ConfigError("plan: give a SOURCE: a run's directory, a verl log or a costs.yaml.")
    from rich.console import Console

    from dataflow.planning.plan import make_plan
    from dataflow.system.extras import not_installed
    from dataflow.timeline import files

    files.check(options.out)
    if options.out and (why := not_installed("matplotlib")) is not None:
        raise ConfigError(f"-o {options.out}: {why}")
    with Console(stderr=True).status("") as status:
        plan = make_plan(options.source, options.overrides, status.update)
    if options.out:
        plan.save(options.out, f"predicted: {Path(options.source).name}")
    print(json.dumps(plan.as_dict(), indent=1) if options.json else plan.text() + files.written(options.out))
    return 0


def _timeline(options: argparse.Namespace) -> int:
    from dataflow.commands.timeline import timeline

    return timeline(options)


def _samples(options: argparse.Namespace) -> int:
    from dataflow.samples.command import show

    print(show(options.run, options.overrides, options.out, options.json))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from dataflow.commands.compare import compare
    from dataflow.timeline import files

    files.check(options.out)
    runs = options.runs
    if runs[0].endswith(_FILES):
        from dataflow.commands.compare import run_all

        report(training=True)  # its runs close by themselves, which takes a while
        runs = run_all(runs[0], runs[1:])
    print(compare(runs, options.out, options.json))
    return 0


def _import_verl(options: argparse.Namespace) -> int:
    from dataflow.importing.command import run

    print(run(options.words, options.out, options.keys))
    return 0
