from __future__ import annotations

import io
import re
import threading
import time

import pytest

from shared_offload.report.progress import Progress, amount, clock, rate


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_every_task_ends_with_amount_seconds_and_rate() -> None:
    out = io.StringIO()
    progress = Progress(stream=out, interval=60)
    with progress.task("load DiT", 3e9, "B") as task:
        task.advance(3e9)
        task.started -= 2  # as if two seconds had passed
    (line,) = lines(out)
    found = re.fullmatch(r"load DiT: 3\.00 GB in 2\.\d s \((\d\.\d\d) GB/s\)", line)
    assert found
    assert float(found[1]) == pytest.approx(1.5, abs=0.02)


def test_a_slow_rate_is_not_told_as_zero() -> None:
    assert rate(816e3, 2.5, "B") == "0.33 MB/s"
    assert rate(4.11e6, 0.147, "B") == "27.96 MB/s"
    assert rate(1e9, 10, "B") == "0.10 GB/s"


def test_plain_lines_come_at_the_interval_and_tell_the_time_left() -> None:
    out = io.StringIO()
    progress = Progress(stream=out, interval=0.1)
    with progress.task("denoise", 40, "step") as task:
        end = time.monotonic() + 0.45
        while time.monotonic() < end:
            task.advance(0.05)
            time.sleep(0.005)
    *during, last = lines(out)
    assert 3 <= len(during) <= 4
    assert re.fullmatch(
        r"denoise: [\d.]+ / 40 steps \(\d+ %\), [\d.]+ s/step, [\d.]+ s left", during[0]
    )
    assert last.startswith("denoise: ")
    assert " left" not in last


def test_a_failed_task_says_where_it_stopped() -> None:
    out = io.StringIO()
    progress = Progress(stream=out)
    with pytest.raises(ZeroDivisionError), progress.task("denoise", 40, "step") as task:
        task.advance()
        raise ZeroDivisionError
    assert lines(out)[0].startswith("denoise: stopped at 1 / 40 steps (2 %)")


def test_threads_lose_no_advance() -> None:
    progress = Progress(stream=io.StringIO(), interval=0.001)
    with progress.task("read", 40_000, "B") as task:

        def work() -> None:
            for _ in range(10_000):
                task.advance(1)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert task.done == 40_000


def test_disabled_is_silent_but_measures() -> None:
    out = io.StringIO()
    progress = Progress(stream=out, enabled=False, interval=0)
    with progress.stage("load"), progress.task("read", 2, "B") as task:
        task.advance(1)
        time.sleep(0.02)
    progress.note("note")
    progress.warn("warn")
    progress.summary()
    assert out.getvalue() == ""
    assert progress.stage_seconds["load"] >= 0.02


def test_stages_add_up_and_nested_ones_count_once() -> None:
    out = io.StringIO()
    progress = Progress(stream=out)
    for _ in range(2):
        with progress.stage("outer"), progress.stage("inner"):
            time.sleep(0.03)
    progress.summary()
    rows = {line.split()[0]: float(line.split()[1]) for line in lines(out)}
    assert 0.06 <= rows["inner"] <= rows["outer"]
    assert rows["total"] == rows["outer"]


def test_terminal_shows_a_bar_and_keeps_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    progress = Progress(stream=out, interval=0)
    with progress.task("read [x]", 2e9, "B") as one, progress.task("wait", None, "it") as two:
        one.advance(1e9)
        two.advance()
        progress.note("from [above]")
        time.sleep(0.25)  # two refreshes
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "1.00 / 2.00 GB (50 %)" in text
    assert "\u2501" in text, "no bar"
    assert "from [above]\n" in text
    assert text.strip().splitlines()[-1].startswith("read [x]: 1.00 GB in ")
    for thread in threading.enumerate():
        if "refresh" in type(thread).__name__.lower():
            thread.join(1)
            assert not thread.is_alive(), "the display still refreshes"


def test_a_closed_stream_does_not_end_the_run() -> None:
    class Closed(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    progress = Progress(stream=Closed())
    with progress.task("read", 1, "B") as task:
        task.advance(1)


def test_words() -> None:
    assert amount(5e8, "B", of=16.17e9) == "0.50 / 16.17 GB"
    assert amount(17, "B") == "17 B"
    assert amount(1, "step") == "1 step"
    assert amount(1, "step", of=4) == "1 / 4 steps"
    assert rate(10, 46.5, "step") == "4.65 s/step"
    assert [clock(s) for s in (0.4213, 5.31, 41.7, 185, 3723)] == [
        "0.421 s",
        "5.3 s",
        "42 s",
        "3:05",
        "1:02:03",
    ]
