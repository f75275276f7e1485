"""Export target `adapter`: the LoRA weights in PEFT format, with tokenizer, chat template and stop ids."""

from pathlib import Path
from typing import ClassVar

from tunewell.core.progress import Progress
from tunewell.export.proof.reference import ProofContext
from tunewell.export.proof.transformers import prove_adapter
from tunewell.export.targets.base import DiskUse, ExportContext, ExportTarget, Requirements
from tunewell.model_files.catalogue import find_entry_of
from tunewell.model_files.files import locate
from tunewell.records.parity import Artefact, Check

_EXAMPLE = """from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, {also}GenerationConfig

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base!r}{quantized}), "adapter")
model.generation_config = GenerationConfig.from_pretrained("adapter")  # where replies end
tokenizer = AutoTokenizer.from_pretrained("adapter")"""


class AdapterTarget(ExportTarget):
    """The export target for a folder that `PeftModel.from_pretrained` loads on the base model."""

    name: ClassVar = "adapter"
    requires: ClassVar = Requirements(packages=("peft",), adapter=True)

    def disk_use(self, context: ExportContext) -> DiskUse:
        """Return the size of the adapter's weights."""
        assert context.model.adapter is not None
        return DiskUse({self.name: context.model.adapter.files(None).num_bytes})

    def write(self, context: ExportContext) -> list[Artefact]:
        """Write the adapter's tensors with the names that PEFT expects, and the tokenizer and settings."""
        adapter, folder = context.model.adapter, context.staging_dir / self.name
        assert adapter is not None
        context.progress(Progress("writing the adapter"))
        folder.mkdir()
        base = context.model.ref.base
        # PEFT resolves a relative path from the working directory of its process.
        base_path = str(Path(base).resolve()) if base and Path(base).exists() else base
        # The files of the run are not copied: earlier versions, and PEFT itself, wrote names that PEFT does not always
        # find.
        named = base_path
        if base and base.startswith("package:") and (entry := find_entry_of(str(locate(base).gguf))):
            # Other programs cannot resolve `package:`; tunewell takes the name in the proof.
            context.notes.append(f"the adapter names `{entry.name}` as its base: `{base}` is a quantised copy of it")
            named = base = entry.name
        adapter.files(named).write(folder)
        context.model.tokenizer.save(folder, context.template.source)
        context.generation_config().save_pretrained(folder)
        plan = context.model.ref.plan
        quantized = plan.quantized.loading_argument if plan and plan.quantized else ""
        also = "BitsAndBytesConfig, " if quantized else ""
        example = _EXAMPLE.format(base=base or "the base model", quantized=quantized, also=also)
        context.write_card(folder, library="peft", example=example)
        return [context.artefact(self.name, "fp32", folder)]

    def prove(self, artefact: Artefact, context: ProofContext) -> list[Check]:
        """Load the adapter with PEFT on its base model, and compare it with the trained model."""
        return prove_adapter(artefact, context)
