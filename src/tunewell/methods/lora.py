"""LoRA: low-rank adapters for frozen linear layers, and fully fine-tuned modules (`modules_to_save`)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tunewell.config.schema import MethodSettings
from tunewell.core.errors import UserError
from tunewell.methods.base import AdapterLayer, AdapterMethod, MethodFiles, trainable_parameters
from tunewell.methods.peft_format import (
    Selection,
    adapter_config,
    is_within,
    layer_index,
    match_full_modules,
    match_parameters,
    match_targets,
    peft_name,
    require_supported_settings,
    saved_tables,
    suggest_names,
    text_part_name,
    tied_names,
)
from tunewell.methods.targets import (
    expert_notes,
    last_names,
    linear_layers,
    select_layers,
    with_embeddings,
    with_tied,
)
from tunewell.models.fp32_modules import use_fp32_weights
from tunewell.models.shared import own_trainable
from tunewell.records.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapter_config

_TRAINED = (".lora_A", ".lora_B", ".lora_magnitude_vector")


class Lora(AdapterMethod):
    """LoRA in fp32 on frozen linear layers, saved in PEFT's format."""

    layer_class: ClassVar[type["LoraLinear"]]
    is_dora: ClassVar = False

    def __init__(self, model: PreTrainedModel, selection: Selection, text_prefix: str, sizes: dict[str, Any]) -> None:
        """Freeze a model, and put low-rank matrices of these sizes, by PEFT's names, around the selected layers."""
        super().__init__(model, [])
        self.config = adapter_config(model, selection, text_prefix) | sizes | {"use_dora": self.is_dora}
        """PEFT's `adapter_config.json`, without the name of the base model."""
        rank, alpha, dropout = sizes["r"], sizes["lora_alpha"], sizes["lora_dropout"]
        if "target_parameters" in self.config:
            self.config["lora_dropout"] = 0.0  # PEFT rejects both together; it matters only for further training
        self._full_modules, self._text_prefix = selection.full_modules, text_prefix
        self._initial: dict[str, Tensor] = {}
        model.requires_grad_(False)
        for name in selection.linears:
            base: Any = model.get_submodule(name)
            scale = alpha / (rank**0.5 if sizes["use_rslora"] else rank)
            layer = self.layer_class(base, rank=rank, scale=scale, dropout=dropout)
            layer.train(base.training)
            model.set_submodule(name, layer)
        for name in selection.full_modules:
            _train_in_full(model, name)

    @classmethod
    def load_dtype(cls, precision: torch.dtype) -> torch.dtype:
        """Return the precision of the run, because frozen weights need no more."""
        return precision

    @classmethod
    def identity(cls, settings: MethodSettings) -> dict[str, Any]:
        """Return all settings of the adapter. The weights of an earlier adapter are compared, not its path."""
        return settings.model_dump(mode="json", exclude={"kind", "adapter"})

    @classmethod
    def apply(
        cls,
        model: PreTrainedModel,
        settings: MethodSettings,
        *,
        seed: int,
        text_prefix: str = "",
        has_new_tokens: bool = False,
    ) -> Self:
        """Freeze a model and add new low-rank matrices to its linear layers."""
        if has_new_tokens:
            settings = with_embeddings(settings, model)
        rank, alpha = settings.rank_and_alpha
        sizes = {"r": rank, "lora_alpha": alpha, "lora_dropout": settings.dropout}
        notes = expert_notes(model, settings)
        method = cls(model, select_layers(model, settings), text_prefix, sizes | {"use_rslora": settings.rslora})
        method.notes += notes
        generator = torch.Generator().manual_seed(seed)
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.reset_parameters(generator)
        method._keep_initial()
        return method

    @classmethod
    def reads(cls, config: Mapping[str, Any]) -> bool:
        """Return True for adapters of PEFT's type LORA without `use_dora`."""
        return config.get("peft_type") == "LORA" and not config.get("use_dora")

    @classmethod
    def load(
        cls, model: PreTrainedModel, folder: Path, *, text_prefix: str = "", settings: MethodSettings | None = None
    ) -> Self:
        """Load an adapter written by PEFT or tunewell into a model. Raise UserError if it is not supported.

        With `settings`, the adapter goes on being trained: they must select its layers.
        """
        config, where, config_path = read_adapter_config(folder), str(folder / ADAPTER_WEIGHTS), folder / ADAPTER_CONFIG
        require_supported_settings(config, config_path)
        tensors = {text_part_name(name): tensor for name, tensor in load_file(folder / ADAPTER_WEIGHTS).items()}
        _require_same_tables(model, tensors, is_tied=bool(config.get("ensure_weight_tying")), where=where)
        selection = _saved_selection(model, config, tensors, where=str(config_path))
        if settings is not None:
            _require_same_layers(model, settings, selection, where=str(config_path))
        sizes = {
            "r": config["r"],
            "lora_alpha": config["lora_alpha"],
            "lora_dropout": config.get("lora_dropout", 0.0) if settings is None else settings.dropout,
            "use_rslora": bool(config.get("use_rslora")),
        }
        method = cls(model, selection, text_prefix, sizes)
        method._copy_in(tensors, where=where)
        if settings is not None:
            method._keep_initial()
        return method

    @property
    def has_base(self) -> bool:
        """Whether only low-rank matrices were trained. Disabling the adapter does not restore `modules_to_save`."""
        return not self.config["modules_to_save"]

    def files(self, base_model: str | None) -> MethodFiles:
        """Return the adapter in PEFT's format."""
        config = self.config | {"base_model_name_or_path": base_model}
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        return MethodFiles({ADAPTER_WEIGHTS: self.tensors()}, {ADAPTER_CONFIG: text})

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy the tensors of a checkpoint into the adapter."""
        self._copy_in(tensors[ADAPTER_WEIGHTS], where="checkpoint")

    def reset(self, weights: Mapping[str, Tensor]) -> None:
        """Reset the model to its initial weights and the adapter to its initial matrices."""
        super().reset(weights)
        self._copy_in(self._initial, where="initial adapter")

    def _keep_initial(self) -> None:
        """Copy the adapter before the first step, for `reset`."""
        self._initial = {name: tensor.cpu().clone() for name, tensor in self.tensors().items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapter's tensors by PEFT's names. A tied head and embedding are both listed, as in PEFT."""
        tensors = {
            peft_name(name, self._text_prefix): parameter.detach()
            for name, parameter in self.model.named_parameters()
            if name.endswith(_TRAINED) or is_within(name, self._full_modules)
        }
        tied = [peft_name(f"{name}.weight", self._text_prefix) for name in tied_names(self.model)]
        for tensor in [tensors[name] for name in tied if name in tensors]:
            for name in tied:
                tensors.setdefault(name, tensor.clone())
        return tensors

    @torch.no_grad()
    def _copy_in(self, tensors: Mapping[str, Tensor], *, where: str) -> None:
        """Copy tensors by PEFT's names into the adapter. Raise UserError if names or shapes differ."""
        parameters = {peft_name(name): parameter for name, parameter in trainable_parameters(self.model).items()}
        saved = {text_part_name(name): tensor for name, tensor in tensors.items()}
        tied = [peft_name(f"{name}.weight") for name in tied_names(self.model)]
        if tables := [saved[name] for name in tied if name in saved]:
            others = {name: tensor for name, tensor in saved.items() if name not in tied}
            saved = others | {name: tables[0] for name in tied if name in parameters}
        wrong = sorted(parameters.keys() ^ saved.keys())
        wrong += [name for name in parameters.keys() & saved.keys() if parameters[name].shape != saved[name].shape]
        if wrong:
            raise UserError(
                f"the adapter does not fit this model: {len(wrong)} of its tensors are missing, unexpected or of a "
                f"different shape; the first is `{wrong[0]}`",
                where=where,
                fix=suggest_names(parameters, saved),
            )
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])


def _saved_selection(
    model: PreTrainedModel, config: dict[str, Any], tensors: dict[str, Tensor], *, where: str
) -> Selection:
    """Return the layers that a saved adapter trains."""
    targets, layers = config.get("target_modules") or (), config.get("layers_to_transform")
    linears = tuple(linear_layers(model))
    selected = match_targets(linears, targets)
    layers = None if layers is None else tuple([layers] if isinstance(layers, int) else layers)
    if layers is not None:
        selected = tuple(name for name in selected if layer_index(name) in layers)
    selected += match_parameters(linears, config.get("target_parameters") or (), where)
    full_names = tuple(config.get("modules_to_save") or ())
    names = [name for name, _ in model.named_modules() if name]
    # PEFT also saves the embedding and the head of a resized vocabulary, which its config does not list.
    full_modules = with_tied(model, (*match_full_modules(names, full_names, tensors), *saved_tables(model, tensors)))
    return Selection(
        linears=tuple(dict.fromkeys(name for name in selected if not is_within(name, full_modules))),
        full_modules=full_modules,
        linear_names=tuple(last_names(selected)) if isinstance(targets, str) else tuple(targets),
        layers=layers,
        full_names=full_names,
    )


def _require_same_layers(model: PreTrainedModel, settings: MethodSettings, saved: Selection, *, where: str) -> None:
    """Raise UserError if the settings that were given select other layers than an adapter that goes on training."""
    if not {"targets", "layers", "modules_to_save"} & settings.model_fields_set:
        return
    given = select_layers(model, settings)
    are_linears_set = {"targets", "layers"} & settings.model_fields_set
    wrong = set(given.linears) ^ set(saved.linears) if are_linears_set else set[str]()
    if "modules_to_save" in settings.model_fields_set:
        wrong |= set(given.full_modules) ^ set(saved.full_modules)
    if wrong:
        raise UserError(
            f"the config selects other layers than the adapter: {len(wrong)} differ, for example `{min(wrong)}`",
            where=where,
            fix="remove `method.targets`, `method.layers` and `method.modules_to_save`: the adapter has its own; to "
            "train other layers, merge it first with `tunewell export --to merged`",
        )


def _require_same_tables(model: PreTrainedModel, tensors: Mapping[str, Tensor], *, is_tied: bool, where: str) -> None:
    """Raise UserError if the adapter's embedding or head has other tokens, or if both differ but the model ties them.

    `is_tied` is whether the adapter stores one of them for both.
    """
    names = saved_tables(model, tensors)
    tables = [tensors[peft_name(f"{name}.weight")] for name in names]
    embedding: Any = model.get_input_embeddings()
    num_tokens = len(embedding.weight)
    for name, table in zip(names, tables, strict=True):
        if len(table) != num_tokens:
            raise UserError(
                f"the adapter does not fit this model: its `{name}` has {len(table):,} tokens, the model has "
                f"{num_tokens:,}",
                where=where,
                fix="tokens were added for the adapter: put the tokenizer with which it was trained into its folder, "
                "or use a base model with as many tokens",
            )
    if not tables or not tied_names(model) or (len(tables) == 1 and is_tied):
        return
    other = tables[1] if len(tables) == 2 else embedding.weight.detach().cpu().to(tables[0].dtype)
    if not torch.equal(tables[0], other):
        raise UserError(
            "the adapter has different weights for the head and the embedding, but this model ties the two",
            where=where,
            fix="train it again with PEFT's `ensure_weight_tying: true`, or merge it with PEFT into a model with "
            "`tie_word_embeddings: false` and use that model",
        )


def _train_in_full(model: PreTrainedModel, name: str) -> None:
    """Make a module trainable in fp32. A tied head and embedding stay tied."""
    module = model.get_submodule(name)
    is_tied = name in tied_names(model)
    parts: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()] if is_tied else [module]
    # Read the dtype before the conversion, because converting one tied module converts the shared weight.
    dtype = next(module.parameters()).dtype
    for part in parts:
        if dtype != torch.float32 and not use_fp32_weights(part, dtype):
            raise UserError(
                f"`{name}` cannot be fully fine-tuned in a 16-bit model: only embeddings and linear layers can",
                fix="remove it from `method.modules_to_save`, or set `train.precision: fp32`",
            )
        part.float().requires_grad_(True)
        own_trainable(part)
    if is_tied:
        model.tie_weights()


class LoraLinear(AdapterLayer):
    """A frozen linear layer with low-rank matrices: y = W x + scale * B A x.

    The frozen layer may be any module with `weight`, `bias`, `in_features` and `out_features`, or GPT-2's `Conv1D`,
    which stores its weight transposed. If it has its own `forward`, that is called. For a plain `nn.Linear`, and for
    modules with `is_matrix`, such as quantised ones, the sum is computed in one pass.
    """

    def __init__(self, base: Any, *, rank: int, scale: float, dropout: float) -> None:
        super().__init__()
        self.base_layer = base
        self.is_transposed = isinstance(base, Conv1D)
        self.scale = scale
        self.dropout = dropout
        self._is_plain = getattr(base, "is_matrix", type(base).forward is nn.Linear.forward)
        self._cast: tuple[Tensor, Tensor] | None = None
        device = base.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, device=device, dtype=torch.float32))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, device=device, dtype=torch.float32))

    @property
    def in_features(self) -> int:
        return self.base_layer.nx if self.is_transposed else self.base_layer.in_features

    @property
    def out_features(self) -> int:
        return self.base_layer.nf if self.is_transposed else self.base_layer.out_features

    @property
    def weight(self) -> Tensor:
        """The frozen weight. Some models read its dtype."""
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Initialise as PEFT does: A uniform, as for a linear layer, and B zero, so that the output is unchanged."""
        bound = self.in_features**-0.5
        initial = torch.rand(self.lora_A.shape, generator=generator) * (2 * bound) - bound
        with torch.no_grad():
            self.lora_A.copy_(initial)
            self.lora_B.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_enabled:
            return self.base_layer(x)
        is_dense = isinstance(self.base_layer, nn.Linear | Conv1D)
        dtype = self.base_layer.weight.dtype if is_dense else x.dtype
        a, b = self._cast or (self.lora_A.to(dtype), self.lora_B.to(dtype))
        has_dropout = self.dropout > 0 and self.training
        if has_dropout or not self._is_plain or torch.compiler.is_compiling():
            adapted = F.dropout(x, self.dropout) if has_dropout else x
            return self.base_layer(x) + F.linear(F.linear(adapted, a) * self.scale, b)
        return _LowRank.apply(x.flatten(0, -2), self.scale, self.base_layer, a, b).unflatten(0, x.shape[:-1])

    def cast(self, dtype: torch.dtype | None) -> None:
        """Cache the matrices in the model's dtype for decoding. None clears the cache."""
        self._cast = None if dtype is None else (self.lora_A.detach().to(dtype), self.lora_B.detach().to(dtype))

    def merged(self) -> nn.Module:
        """Return the frozen layer with the weight W + scale * B A, in fp32 to avoid rounding errors."""
        base = self.base_layer
        if base.weight.dtype != torch.float32:
            raise TypeError(f"merging needs a weight in fp32, not {base.weight.dtype}")
        matrix = base.weight.T if self.is_transposed else base.weight
        matrix.add_(self.lora_B @ self.lora_A, alpha=self.scale)
        return base

    def weight_change(self, rows: slice) -> Tensor:
        """Return rows of scale * B A."""
        a, b = self._factors()
        return b[rows] @ a

    def change_direction(self) -> Tensor | None:
        """Return the first right singular vector of B A."""
        a, b = self._factors()
        across, rest = torch.linalg.qr(a.T)
        _, sizes, vectors = torch.linalg.svd(b @ rest.T, full_matrices=False)
        return across @ vectors[0] if sizes.numel() and float(sizes[0]) else None

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Return two factors whose product B A is the change of the stored weight."""
        a, b = self.lora_A.cpu().double(), self.lora_B.cpu().double() * self.scale
        return (b.T, a.T) if self.is_transposed else (a, b)


Lora.layer_class = LoraLinear


class _LowRank(torch.autograd.Function):
    """LoRA with the low-rank part added in place, which saves one pass over the output and over the gradient.

    No gradient is computed for W, and W is read from its layer again in the backward pass: a quantised layer computes
    it at each read. The gradient for x is computed only if an earlier layer is trained.

    Shapes: T tokens, K inputs, N outputs, R rank.
    """

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, scale: float, base: nn.Linear, a_RK: Tensor, b_NR: Tensor) -> Tensor:
        xa_TR = x_TK @ a_RK.T
        ctx.save_for_backward(x_TK, xa_TR, a_RK, b_NR)
        ctx.scale, ctx.base = scale, base
        return F.linear(x_TK, base.weight, base.bias).addmm_(xa_TR, b_NR.T, alpha=scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx_TK, da_RK, db_NR = low_rank_grads(ctx, grads[0], *ctx.saved_tensors)
        return dx_TK, None, None, da_RK, db_NR


def low_rank_grads(
    ctx: Any, dy_TN: Tensor, x_TK: Tensor, xa_TR: Tensor, a_RK: Tensor, b_NR: Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of x, A and B in y = W x + scale * B A x."""
    zero = x_TK.new_zeros(())
    dxa_TR = torch.addmm(zero, dy_TN, b_NR, beta=0, alpha=ctx.scale)
    # Transposed, because a product with so few columns is two to five times slower than one with so few rows.
    db_NR = torch.addmm(zero, xa_TR.T, dy_TN, beta=0, alpha=ctx.scale).T
    dx_TK = (dy_TN @ ctx.base.weight).addmm_(dxa_TR, a_RK) if ctx.needs_input_grad[0] else None
    return dx_TK, dxa_TR.T @ x_TK, db_NR
