"""Listeners that change progress."""

from tunewell.core.progress import Progress, only_stage


def test_one_stage_is_shown_and_the_others_are_one():
    """`train` shows downloads; without the second line, it would say `downloading` while it tokenises."""
    shown: list[Progress] = []
    show = only_stage(shown.append, "downloading", "preparing the corpus")
    for stage in ("listing", "downloading", "reading", "writing", "downloading"):
        show(Progress(stage))
    assert [progress.stage for progress in shown] == ["downloading", "preparing the corpus", "downloading"]
