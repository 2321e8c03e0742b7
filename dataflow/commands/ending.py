"""How a command ends: every error as one line on stderr, and an exit code."""

from __future__ import annotations

import argparse
import errno
import os
import sys

from dataflow.errors import DataflowError, Interrupted, RewardFailed, UserError
from dataflow.system.extras import missing_extra
from dataflow.system.secrets import redact
from dataflow.system.stopping import stopping

_LONGEST_LINE = 2000


def act(options: argparse.Namespace) -> int:
    """Runs one command; prints an error as one line. Returns the exit code, see :func:`dataflow.cli.main`."""
    with stopping:
        try:
            code = int(options.act(options) or 0)
            sys.stdout.flush()
            return code
        except Interrupted as error:
            print(f"\ninterrupted: {error}", file=sys.stderr)
            return stopping.exit_code
        except (DataflowError, ImportError) as error:
            if (why := missing_extra(error)) is not None:
                print(f"ConfigError: {why}", file=sys.stderr)
                return 2
            return _failed(error) if isinstance(error, DataflowError) else interrupted()
        except BrokenPipeError:
            _drop_output()
            sys.stderr.close()
            return 0
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                return interrupted()
            what = "the output" if error.filename is None else one_line(str(error.filename))
            print(f"RunError: {what} cannot be written: {error.strerror}; make room there.", file=sys.stderr)
            if error.filename is None:
                _drop_output()
            return 1
        except BaseException:
            return interrupted()


def interrupted() -> int:
    """Ends a command that a signal interrupted; raises the current error again if there was no signal.

    If a signal interrupts the import of an extension module, the module raises an error of another kind.
    """
    if stopping.received is None and not isinstance(sys.exception(), KeyboardInterrupt):
        raise
    print("\ninterrupted", file=sys.stderr)
    return stopping.exit_code


def _failed(error: DataflowError) -> int:
    if isinstance(error, UserError):
        print(f"{type(error).__name__}: {one_line(redact(str(error)))}", file=sys.stderr)
        return 2
    cause = error.__cause__
    # The traceback of a worker is above the sentence, as Python has it. That of a reward is in frames of the agent; its
    # sentence has the place in the user's code.
    traces = () if isinstance(cause, RewardFailed) else getattr(cause, "__notes__", ())
    sentence = f"{type(error).__name__}: {error}"
    for text in (*traces, sentence, *getattr(error, "__notes__", ())):
        print(redact(str(text)), file=sys.stderr)
    return 1


def _drop_output() -> None:
    """Discards buffered output of stdout, which the interpreter would try to write again at its exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def one_line(text: str) -> str:
    """Returns a message as one printable line; texts from a user or a file may contain line breaks or escapes.

    >>> one_line("name=a\\nb: give a plain name.")
    'name=a\\\\nb: give a plain name.'
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text.strip())
    return shown if len(shown) <= _LONGEST_LINE else f"{shown[: _LONGEST_LINE // 2]} ... {shown[-_LONGEST_LINE // 2 :]}"
