"""Following a run: a real server, a trace that grows."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest

from dataflow.cli import main
from dataflow.timeline import perfetto
from dataflow.timeline.page.follow import LEAST_S
from dataflow.timeline.writer import TraceWriter
from tests.rigs.following import followed
from tests.rigs.made_up import made_up

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]


def test_from_before_its_first_task_until_after_its_end(tmp_path: Path) -> None:
    trace = made_up(3)
    with followed(tmp_path) as server, server.events() as events:
        assert next(events) == 1
        assert "has not begun" in server.page()

        with TraceWriter(tmp_path / "trace.json", {**trace.meta, "status": "running"}) as writer:
            writer.add(*trace.spans[:6])
            # The file alone may have been seen first, without a task in it.
            while "has not ended" not in (page := server.page()):
                next(events)
            assert "<b>0 steps</b>" in page, "tasks of two steps have ended, and no whole step"
            writer.add(*trace.spans[6:], *trace.marks)
            writer.close(trace)
        while "has not ended" in (page := server.page()):
            next(events)
        assert "<b>3 steps</b>" in page
        assert "Cut off" not in page

    # Of a run that is over there is the page at once.
    with followed(tmp_path) as server, server.events() as events:
        while next(events) < 2:
            pass
        assert "<b>3 steps</b>" in server.page()


def test_however_often_the_file_changes_the_page_is_made_once_in_a_while(tmp_path: Path) -> None:
    with followed(tmp_path) as server, server.events() as events:
        made, begin = next(events), time.monotonic()
        for steps in range(1, 40):
            perfetto.write(made_up(steps), tmp_path / "trace.json")
        # A file that cannot be read any more does not take the page away.
        (tmp_path / "trace.json").write_text("{")
        perfetto.write(made_up(40), tmp_path / "trace.json")
        while "<b>40 steps</b>" not in server.page():
            made = next(events)
        # On a busy machine all this takes longer, and more pages are made meanwhile.
        assert made - 1 <= (time.monotonic() - begin) / LEAST_S + 1


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_told_to_end_it_ends_though_a_browser_listens(tmp_path: Path, sign: signal.Signals) -> None:
    perfetto.write(made_up(1), tmp_path / "trace.json")
    with followed(tmp_path) as server, server.events() as events:
        next(events)
        begin = time.monotonic()
        code, said = server.end(sign)
        assert code == 130, said
        assert said.strip() == "interrupted: the page is no longer served"
        assert time.monotonic() - begin < 20


def test_what_cannot_be_followed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*more: str) -> str:
        assert main(["timeline", *more, "--follow"]) == 2
        said = capsys.readouterr().err.strip()
        assert len(said.splitlines()) == 1
        return said

    assert "there is no directory" in refused(str(tmp_path / "nothing"))
    assert "leave -o" in refused(str(tmp_path), "-o", "x.html")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port}: " in refused(str(tmp_path), "--port", str(port))
