"""The command line: run, show, plan and the others. Wrong input is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.commands import completion
from dataflow.commands.arguments import Parser, Version, as_key, is_dry
from dataflow.commands.ending import act, unreadable_logging
from dataflow.commands.trace import read_trace
from dataflow.errors import ConfigError, Interrupted
from dataflow.files import written
from dataflow.system.stopping import stopping
from dataflow.system.streams import open_standard_streams, take_any_character
from dataflow.system.supervisor import report

if TYPE_CHECKING:
    from dataflow.running.reporting.progress import Progress
    from dataflow.running.session import Session

_FILES = (".py", ".yaml", ".yml")
"""Ends of the names of what can be run."""
EXAMPLES = {
    "run": "dataflow run pipelines/gsm8k_grpo.py policy=mini-batch steps=5",
    "resume": "dataflow resume runs/gsm8k_grpo-both-1 steps=60",
    "export": "dataflow export runs/gsm8k_grpo-both-1 -o my-model",
    "doctor": "dataflow doctor --start",
    "completion": 'eval "$(dataflow completion bash)"',
    "init": "dataflow init my-project",
    "show": "dataflow show pipelines/gsm8k_grpo.py policy=both steps=2",
    "plan": "dataflow plan runs/gsm8k_grpo-baseline-1 sweep=reward.concurrency:16:256 -o plan.png",
    "timeline": "dataflow timeline runs/gsm8k_grpo-both-1 -o timeline.html",
    "import-verl": "dataflow import-verl run_qwen3_8b.sh -o run.sh",
    "samples": "dataflow samples runs/gsm8k_grpo-both-1 step=12 sort=-latency where='score<0.5'",
    "compare": "dataflow compare runs/a runs/b -o compare.html",
}


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
    if own:
        open_standard_streams()
        take_any_character()
        completion.complete(parser)
    # Options may come between key=value arguments, which argparse alone does not accept.
    options, rest = parser.parse_known_args(arguments)
    takes_more = getattr(options, "overrides", getattr(options, "runs", None))
    if rest and (takes_more is None or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}{as_key(rest, arguments)}")
    if rest:
        takes_more += rest
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    if own and _trains(options) and unreadable_logging() is None:  # otherwise `act` says why
        from dataflow.running.remains import finish_killed
        from dataflow.system.supervisor import can_supervise, supervise

        if can_supervise():
            return supervise(lambda: act(options), finish_killed)
    return act(options)


def _trains(options: argparse.Namespace) -> bool:
    """Whether a command runs a pipeline."""
    if options.command == "compare":
        return bool(options.runs[0].endswith(_FILES))
    if options.command == "run":
        return not options.keys and all(text.replace(" ", "").lower() != "dry=true" for text in options.overrides)
    return bool(options.command == "resume")


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands, which the documentation prints, too."""
    parser = Parser(
        prog="dataflow",
        description="Schedules RL post-training so that slow rewards hide behind GPU work.",
        epilog="example: " + EXAMPLES["run"],
    )
    parser.add_argument("--version", action=Version, nargs=0, help="print the version, and stop")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, act: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example: {EXAMPLES[name]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(act=act)
        return command

    run = add("run", _run, "Trains a pipeline.")
    run.add_argument(
        "pipeline",
        nargs="?",
        metavar="PIPELINE.py",
        help="or a recipe, or the config.yaml of a run",
    )
    run.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="configuration, --keys lists them; dry=true only checks everything",
    )
    run.add_argument("--keys", action="store_true", help="list every key with its default, and stop")
    run.add_argument("--json", action="store_true", help="print the summary as JSON")
    run.add_argument("--quiet", action="store_true", help="no progress")

    resume = add("resume", _resume, "Resumes a run from its last whole checkpoint.")
    resume.add_argument("run", metavar="RUN", help="a run's directory")
    resume.add_argument("overrides", nargs="*", metavar="key=value", help="what may change, such as steps=60")
    resume.add_argument("--json", action="store_true", help="print the summary as JSON")
    resume.add_argument("--quiet", action="store_true", help="no progress")

    export = add("export", _export, "Writes the model of a run's checkpoint as a Hugging Face directory.")
    export.add_argument("run", metavar="RUN", help="a run's directory")
    export.add_argument("overrides", nargs="*", metavar="step=N", help="of which step; the newest by default")
    export.add_argument("-o", dest="out", metavar="DIR", help="directory to make; RUN/model by default")
    export.add_argument("--adapter", action="store_true", help="the LoRA adapter alone, which is merged otherwise")

    init = add("init", _init, "Writes a project of your own: pipeline, reward, configuration, README and tests.")
    init.add_argument("directory", metavar="DIR", help="directory to write it to")

    doctor = add("doctor", _doctor, "Says what is installed and what this machine has, and the fix of each problem.")
    doctor.add_argument("--start", action="store_true", help="start vLLM once, too (half a minute)")
    doctor.add_argument("--json", action="store_true", help="print it as JSON")

    complete = add("completion", _completion, "Prints what a shell evaluates to complete commands, options and files.")
    complete.add_argument("shell", metavar="SHELL", choices=completion.SHELLS, help=", ".join(completion.SHELLS))

    show = add("show", _show, "Shows the stages of a pipeline, or the graph unrolled over steps=N.")
    show.add_argument("pipeline", metavar="PIPELINE.py")
    show.add_argument("overrides", nargs="*", metavar="key=value")
    show.add_argument("-o", dest="out", metavar="FILE.mmd|.svg|.png", help="draw it")
    show.add_argument("--costs", metavar="RUN", help="a run whose stage times say what the critical path is")
    show.add_argument("--json", action="store_true", help="print nodes and edges as JSON")

    plan = add("plan", _plan, "Predicts every policy from a run, a verl log or costs written by hand (costs.yaml).")
    plan.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="a run's directory, a verl log (console, jsonl, CSV, TensorBoard, MLflow), a .yaml",
    )
    more = "what SOURCE does not hold, --keys lists them; or further sources, to compare"
    plan.add_argument("overrides", nargs="*", metavar="key=value", help=more)
    plan.add_argument("-o", dest="out", metavar="FILE.png|.svg|.html", help="draw it")
    plan.add_argument("--keys", action="store_true", help="list every key with its default, and stop")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")

    timeline = add("timeline", _timeline, "Shows one run's overlap.")
    timeline.add_argument("run", metavar="RUN", help="a run's directory, or its trace.json")
    timeline.add_argument("-o", dest="out", metavar="FILE.html|.png|.svg|.txt", help="draw it")
    timeline.add_argument("--json", action="store_true", help="print the numbers as JSON")

    samples = add("samples", _samples, "Shows a run's prompts and responses, with scores and the judge's explanations.")
    samples.add_argument("run", metavar="RUN", help="a run's directory")
    samples.add_argument("overrides", nargs="*", metavar="key=value", help="step, val, where, sort, most")
    samples.add_argument("-o", dest="out", metavar="FILE.html|.parquet", help="write the samples of all steps there")
    samples.add_argument("--json", action="store_true", help="print them as JSON")

    compare = add("compare", _compare, "Shows several runs on one time axis; given a pipeline, runs all four policies.")
    compare.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directories, or PIPELINE.py or a recipe, key=value ..."
    )
    compare.add_argument("-o", dest="out", metavar="FILE.html|.png|.svg", help="draw them; .html to look around in")
    compare.add_argument("--predicted", action="store_true", help="one RUN against its own prediction, stage by stage")
    compare.add_argument("--json", action="store_true", help="print the table as JSON")

    imported = add("import-verl", _import_verl, "Turns a launch of verl into this project's overrides; runs nothing.")
    imported.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="LAUNCH",
        help="a script or a resolved .yaml of verl (then key=value of verl), or python -m verl.trainer.main_ppo ...",
    )
    imported.add_argument("-o", dest="out", metavar="FILE", help="write the new script there")
    imported.add_argument("--keys", action="store_true", help="list verl's keys and ours, and stop")
    imported.add_argument("--json", action="store_true", help="print what becomes of each key as JSON")
    return parser


def _import_verl(options: argparse.Namespace) -> int:
    from dataflow.importing.command import run

    print(run(options.words, options.out, options.json, options.keys))
    return 0


def _run(options: argparse.Namespace) -> int:
    if options.keys:
        from dataflow.config.loading.saved import class_of
        from dataflow.config.run import RunConfig, describe

        print(describe(class_of(options.pipeline) if options.pipeline else RunConfig))
        return 0
    if options.pipeline is None:
        raise ConfigError("run: give a PIPELINE.py, such as pipelines/gsm8k_grpo.py.")
    dry, overrides = is_dry(options.overrides)
    if dry:
        from dataflow.commands.dry import check

        return check(options.pipeline, overrides, options.json)
    progress = _starting(options.pipeline, options)
    from dataflow.config.loading.saved import load

    module, config = load(options.pipeline, overrides)
    from dataflow.running.resume import Complete, began
    from dataflow.running.session import Session, prepare_logging

    prepare_logging()
    session = began(module, config, overrides, progress, Session)
    if isinstance(session, Complete):
        print(json.dumps(session.summary, indent=1) if options.json else f"{session.words}.")
        return 0
    return _train(session, options)


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


def _export(options: argparse.Namespace) -> int:
    from dataflow.running.saving.export import export, step_of

    out = Path(options.out) if options.out else None
    print(export(Path(options.run), out, step_of(options.overrides), options.adapter))
    return 0


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
    else:
        print(end_table(summary))
        print(f"timeline: {page}")
        print(f"trace:    {session.directory / 'trace.json'} (opens in https://ui.perfetto.dev)")
    return 0


def _init(options: argparse.Namespace) -> int:
    from dataflow.commands.init import init

    return init(options.directory)


def _completion(options: argparse.Namespace) -> int:
    print(completion.script(options.shell))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from dataflow.commands.doctor import doctor

    return doctor(options.start, options.json)


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

    from dataflow.planning.picture import KINDS
    from dataflow.planning.plan import beside, make_plan
    from dataflow.system.extras import not_installed
    from dataflow.timeline import files

    files.check(options.out, kinds=KINDS)
    if options.out and (why := not_installed("matplotlib")) is not None:
        raise ConfigError(f"-o {options.out}: {why}")
    keys = [text for text in options.overrides if "=" in text]
    sources = [options.source, *(text for text in options.overrides if "=" not in text)]
    if options.out and len(sources) > 1:
        raise ConfigError(f"-o {options.out}: it shows one source, {len(sources)} are given; draw each by itself.")
    with Console(stderr=True).status("") as status:
        plans = [make_plan(source, keys, status.update) for source in sources]
    plan = plans[0]
    if options.out:
        plan.save(options.out, f"predicted: {Path(options.source).name}")
    if options.json:
        print(json.dumps(plan.as_dict() if len(plans) == 1 else [each.as_dict() for each in plans], indent=1))
    else:
        print("\n\n\n".join([*(each.text() for each in plans), *([beside(plans)] if len(plans) > 1 else [])]))
    if options.out and not options.json:
        print(f"\n{'page' if options.out.lower().endswith('.html') else 'picture'}: {options.out}")
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
    if options.predicted:
        from dataflow.planning.backtest import predicted

        print(predicted(runs, read_trace, options.out, options.json))
        return 0
    if runs[0].endswith(_FILES):
        from dataflow.commands.presets import run_all

        report(training=True)  # its runs close by themselves, which takes a while
        runs = run_all(runs[0], runs[1:])
    print(compare(runs, options.out, options.json))
    return 0
