"""The time left of a whole command: it starts with the expectation and is corrected by what was measured."""

from tunewell.core.progress import Progress, Timetable


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _timetable(expected: dict[str, float]) -> tuple[Timetable, Clock, list[float]]:
    clock, left = Clock(), list[float]()

    def listen(progress: Progress) -> None:
        assert progress.seconds_left is not None
        left.append(progress.seconds_left)

    return Timetable(listen, expected, clock=clock), clock, left


def test_the_expected_time_of_the_whole_command_is_known_at_its_start() -> None:
    table, _, left = _timetable({"load": 3, "merge": 4, "verify": 5})
    table(Progress("loading the model"))
    assert left == [12]


def test_a_slow_machine_makes_the_later_stages_slow() -> None:
    """Guards against a time left that never learns: the first stage took twice as long, so will the others."""
    table, clock, left = _timetable({"load": 9, "merg": 10})
    table(Progress("loading"))
    clock.now = 19
    table(Progress("merging"))
    assert left[-1] == 20


def test_a_stage_that_counts_is_predicted_by_its_own_speed() -> None:
    table, clock, left = _timetable({"answer": 100, "merg": 10})
    table(Progress("answering", 0, 8))
    clock.now = 5
    table(Progress("answering", 4, 8))
    assert left[-1] == 5 + 10, "half of the answers took 5 s, whatever was expected"


def test_stages_that_are_left_out_or_unknown_do_not_stop_the_clock() -> None:
    table, clock, left = _timetable({"load": 1, "merge": 5, "verify": 4})
    table(Progress("loading"))
    clock.now = 1
    table(Progress("wrote a file"))
    clock.now = 2
    table(Progress("verifying gguf q8_0"))
    assert 0 < left[-1] < 4, "the merge was skipped, so everything is faster than expected"
    clock.now = 30
    table(Progress("verifying gguf q8_0"))
    assert left[-1] == 0, "never negative"
