"""An engine that takes its steps in this process: it only moves one weight of a model, by a fixed amount per step."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tunewell.config.load import LoadedConfig
from tunewell.core.errors import UserError
from tunewell.core.files import read_text
from tunewell.data.corpus.reader import Corpus
from tunewell.records.healing import HealingEntry
from tunewell.records.plan import EngineRecord, Plan
from tunewell.runs.engines import EngineRun
from tunewell.training.events import StepTaken
from tunewell.training.run import Ending

_MOVED = "model.norm.weight"


class Nudge:
    """Moves one weight."""

    def require(self, loaded: LoadedConfig) -> EngineRecord:
        if loaded.config.method.kind != "full":
            raise UserError("`engine: nudge` changes the model itself", fix="set `method.kind: full`")
        return EngineRecord(name="nudge", versions={"nudge": "1.0"}, python="none")

    def limits(self, loaded: LoadedConfig) -> list[str]:
        return ["nudge learns nothing"]

    def adapt(self, plan: Plan, corpus: Corpus) -> Plan:
        return plan

    def can_resume(self, folder: Path, step: int) -> bool:
        return self._state(folder, step).is_file()

    def train(self, run: EngineRun) -> Ending:
        first, base = run.progress.step, Path(run.loaded.seen(run.plan.model))
        weights = load_file(self._state(run.folder, first) if first else base / "model.safetensors")
        run.start(num_trainable=1, num_parameters=len(weights))
        for step in range(first + 1, run.plan.num_steps.value + 1):
            weights[_MOVED] = weights[_MOVED] + 1
            run.step(StepTaken(**self._metrics(step)))
            run.beat()
        run.evaluate(step=run.progress.step, loss=2.0, tokens=9, documents=3, seconds=0.1)
        run.heal(HealingEntry(run.progress.step, "nudged", "note", "none", "a weight was moved"))
        run.save(weights, "model.safetensors", {"config.json": read_text(base / "config.json")})
        save_file(weights, self._state(run.folder, run.progress.step))
        return Ending("finished", "moved the weight")

    def _state(self, folder: Path, step: int) -> Path:
        return folder / f"nudge-{step}.safetensors"

    def _metrics(self, step: int) -> dict[str, Any]:
        counts = {"tokens": 40, "supervised_tokens": 20, "documents": 4, "memory_bytes": None}
        values = {"loss": 3.0 / step, "grad_norm": 1.0, "learning_rate": 1.0, "epoch": step / 10, "seconds": 0.1}
        return {"step": step, **values, **counts, "batch_sha256": ""}
