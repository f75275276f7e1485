"""What is known before a run is planned, and where each of its settings comes from."""

from dataclasses import dataclass

from tunewell.config.load import Loaded
from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.hardware.facts import DeviceFacts
from tunewell.records.manifest import Manifest, SplitRecord
from tunewell.records.plan import Chosen


@dataclass(frozen=True)
class PlanOrder:
    """A run to be planned: the settings, the data, the machine and the size of the model."""

    loaded: Loaded
    manifest: Manifest
    device: DeviceFacts
    num_parameters: int | None
    threads: Chosen[int] | None = None
    """As measured; None where nothing was, on a GPU or where `train.threads` is set."""

    @property
    def config(self) -> Config:
        """Give the settings themselves."""
        return self.loaded.config

    @property
    def split(self) -> SplitRecord:
        """Give the training documents' record; raise UserError where there are none."""
        split = self.manifest.splits.get("train")
        if split is None or not split.documents:
            raise UserError(
                "the corpus has no training documents",
                where=f"`{self.config.corpus}`",
                fix="see why in `dropped.jsonl` there, and run `tunewell prepare` on more rows",
            )
        return split

    def is_set(self, key: str) -> bool:
        """Tell whether somebody wrote this key down, even with its default."""
        return _is_written(self.config, key)

    def why(self, key: str) -> str:
        """Say who chose a key's value: `set in tunewell.yaml line 12`, `set by --set seed=1`, or `the default`."""
        if not self.is_set(key):
            return "the default"
        origin = self.loaded.origin(key)
        if origin == "default":
            return "set in the config"
        return f"set by `{origin}`" if origin.startswith("--") else f"set in {origin}"

    def where(self, key: str) -> str:
        """Name the place of a key's value, for an error about it."""
        return self.why(key).removeprefix("set in ").removeprefix("set by ")


def _is_written(config: Config, key: str) -> bool:
    group, _, name = key.rpartition(".")
    # Not `Loaded.origin`: for a key that is not written down it names the line of the group around it.
    branch = getattr(config, group) if group else config
    return name in branch.model_fields_set
