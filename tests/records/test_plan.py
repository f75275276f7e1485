"""A plan is written without secrets, and stays what it is for whoever works by it."""

from tiny_runs import make_plan

from tunewell.records.plan import PLAN, read_plan, write_plan


def test_a_plan_that_was_written_is_read_back(tmp_path):
    """A resume goes on with what was measured then."""
    write_plan(tmp_path, make_plan())
    assert read_plan(tmp_path) == make_plan()


def test_secrets_are_taken_out_of_what_is_written_and_of_nothing_else(tmp_path, monkeypatch):
    """A run's folder is handed around; but a model is loaded from where it is, whatever its folder is called."""
    monkeypatch.setenv("DB_PASSWORD", "s3cr3t-b0x")
    plan = make_plan().model_copy(update={"model": "/srv/s3cr3t-b0x/llama", "config": {"corpus": "s3cr3t-b0x"}})
    write_plan(tmp_path, plan)
    assert plan.model == "/srv/s3cr3t-b0x/llama"
    assert "s3cr3t-b0x" not in (tmp_path / PLAN).read_text() and read_plan(tmp_path).model == "/srv/[redacted]/llama"
