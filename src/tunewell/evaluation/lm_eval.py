"""Run lm-eval benchmarks on a loaded model: `validate --lm-eval TASKS`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from tunewell.core.errors import UserError
from tunewell.core.optional import import_optional
from tunewell.models.attention import stock_attention
from tunewell.models.quiet import quiet


def run_tasks(model: PreTrainedModel, tokenizer_folder: Path, tasks: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the scores by task and metric; a task is a name or the path of its YAML file.

    Raises UserError if lm-eval is not installed, does not know a task, or cannot download its data.
    """
    import_optional("lm_eval", extra="lm-eval", purpose="`validate --lm-eval`")
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]  an extra
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    with quiet(), stock_attention(model):
        try:
            wrapped = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=8)
            found: Any = simple_evaluate(wrapped, tasks=list(tasks), log_samples=False, bootstrap_iters=0)
        except (KeyError, ValueError, OSError, ConnectionError) as error:
            raise UserError(
                f"lm-eval could not run {', '.join(tasks)}: {type(error).__name__}: {str(error).strip()[:200]}",
                fix="`lm-eval ls tasks` lists the tasks; most need a connection to download their data",
            ) from error
    return {
        task: {name: float(value) for name, value in scores.items() if isinstance(value, int | float)}
        for task, scores in found["results"].items()
    }
