"""Numbers of system calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dataflow.rewards.sandbox import calls

HEADERS = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")
NAMED = {**calls._FORBIDDEN, **calls._OWN_ONLY, **calls._SIGNALS, "flock": calls._FLOCK, "fcntl": calls._FCNTL}


@pytest.mark.parametrize("machine", [0, 1], ids=["x86_64", "aarch64"])
def test_they_are_those_of_the_system(machine: int) -> None:
    if not Path(HEADERS[machine]).is_file():
        pytest.skip("this system has no such header")
    lines = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\s", Path(HEADERS[machine]).read_text())
    found = {name: int(number) for name, number in reversed(lines)}
    known = {name: numbers[machine] for name, numbers in NAMED.items() if name in found}  # headers may be older
    assert known == {name: found[name] for name in known}
    assert len(known) > 30


def test_a_machine_whose_numbers_are_not_known_has_no_filter() -> None:
    assert calls.filter_of("riscv64") is None
    rules = (calls.filter_of("aarch64") or {})["rules"]
    assert len({rule[0] for rule in rules}) == len(rules)
