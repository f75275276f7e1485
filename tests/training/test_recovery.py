"""Which remedy follows which trouble, from the mildest on, and where it ends."""

import pytest

from tunewell.config.rules import Healing
from tunewell.records.healing import HealingEntry
from tunewell.training.health import HealthFinding
from tunewell.training.recovery import RecoveryHistory, Rewind, ShrinkMicroBatches, Skip, Stop, decide

RULES = Healing()


def bad(step: int, name: str = "nan-gradients") -> HealthFinding:
    return HealthFinding(name, "warning" if name == "loss-spike" else "fault", step, "it went bad")


def act(past: RecoveryHistory, finding: HealthFinding, **options: bool) -> tuple[object, RecoveryHistory]:
    """Decide, and remember the decision as a run does."""
    action = decide([finding], past, RULES, **options)
    name = {Skip: "skip", Rewind: "rewind", Stop: "stop"}[type(action)]
    changed = {key: getattr(action, key, None) for key in ("rate_share", "precision", "device")}
    entry = HealingEntry(finding.step, finding.name, finding.severity, name, "", **changed)  # type: ignore[arg-type]
    return action, past.at(finding.step, RULES).after(entry)


def ladder(past: RecoveryHistory, *, name: str = "nan-gradients") -> list[str]:
    told = []
    for step in range(10, 30):
        action, past = act(past, bad(step, name))
        told.append(
            "stop"
            if isinstance(action, Stop)
            else "skip"
            if isinstance(action, Skip)
            else next((f"{k} {v}" for k in ("precision", "device", "rate_share") if (v := getattr(action, k))), "back")
        )
        if isinstance(action, Stop):
            break
    return told


@pytest.mark.parametrize(
    ("past", "expected"),
    [
        (RecoveryHistory("fp32", "cpu"), ["skip", "back", "rate_share 0.5", "stop"]),
        (RecoveryHistory("bf16", "cuda"), ["skip", "back", "rate_share 0.5", "precision fp32", "stop"]),
        (RecoveryHistory("fp16", "mps"), ["skip", "back", "rate_share 0.5", "precision fp32", "device cpu", "stop"]),
    ],
)
def test_numbers_that_stay_bad_are_met_with_every_remedy_once(past: RecoveryHistory, expected: list[str]) -> None:
    assert ladder(past) == expected


def test_a_spike_is_left_out_three_times_before_the_run_goes_back() -> None:
    assert ladder(RecoveryHistory("bf16", "cuda"), name="loss-spike") == [
        *["skip"] * 3,
        "back",
        "rate_share 0.5",
        "stop",
    ]


def test_trouble_that_is_over_is_forgotten() -> None:
    _, past = act(RecoveryHistory("fp32", "cpu"), bad(10))
    near, _ = act(past, bad(10 + RULES.quiet_steps))
    far, _ = act(past, bad(11 + RULES.quiet_steps))
    assert isinstance(near, Rewind) and isinstance(far, Skip)


def test_a_bad_weight_is_not_the_documents_fault() -> None:
    action = decide([bad(10)], RecoveryHistory("fp32", "cpu"), RULES, are_weights_bad=True)
    assert isinstance(action, Rewind) and not action.is_quarantining and action.not_after == 9


def test_divergence_goes_back_to_before_it_with_half_the_rate_and_ends_with_advice() -> None:
    finding = HealthFinding("lr-too-high", "fault", 50, "", {"low_step": 22, "learning_rate": 0.01})
    past = RecoveryHistory("fp32", "cpu")
    for share in (0.5, 0.25, 0.125, 0.0625):
        action, past = act(past, finding)
        assert isinstance(action, Rewind) and (action.rate_share, action.not_after) == (share, 22)
    action, _ = act(past, finding)
    assert isinstance(action, Stop) and "0.001" in action.advice and "learning_rate" in action.advice
    assert action.settings == ("train.learning_rate=0.001",)


def test_what_needs_no_answer_gets_none() -> None:
    past = RecoveryHistory("fp32", "cpu")
    assert decide([], past, RULES) is None
    assert decide([HealthFinding("throughput-cliff", "note", 3, "")], past, RULES) is None
    assert decide([HealthFinding("overfitting", "warning", 3, "")], past, RULES) is None
    assert isinstance(decide([HealthFinding("memory-spill", "warning", 3, "")], past, RULES), ShrinkMicroBatches)
    assert isinstance(decide([HealthFinding("zero-grad-no-learning", "fault", 3, "")], past, RULES), Stop)


def test_what_an_earlier_sitting_did_is_remembered() -> None:
    entries = [
        HealingEntry(5, "nan-gradients", "fault", "skip", ""),
        HealingEntry(6, "nan-gradients", "fault", "rewind", "", rewound_to=4),
        HealingEntry(7, "out-of-memory", "warning", "skip", ""),
        HealingEntry(8, "nan-gradients", "fault", "rewind", "", rate_share=0.5),
    ]
    past = RecoveryHistory("bf16", "cuda").after_all(entries, RULES)
    assert (past.num_not_finite, past.num_spikes, past.num_rewinds, past.rate_share) == (3, 0, 2, 0.5)


def test_no_rewind_is_made_where_none_is_allowed() -> None:
    action = decide([bad(10)], RecoveryHistory("fp32", "cpu", num_not_finite=1, last_bad=9), Healing(max_rewinds=0))
    assert isinstance(action, Stop)
