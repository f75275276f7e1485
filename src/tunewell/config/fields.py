"""Base class of config sections, and strict field types."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Strict
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from tunewell.config.extensions import METHODS, OPTIMIZERS
from tunewell.core.registry import Registry

Auto = Literal["auto"]
Int = Annotated[int, Strict()]
Float = Annotated[float, Strict()]
Bool = Annotated[bool, Strict()]
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[Int, Field(ge=0)]
Positive = Annotated[Int, Field(ge=1)]
NonNegative = Annotated[Float, Field(ge=0)]
PositiveFloat = Annotated[Float, Field(gt=0)]
Share = Annotated[Float, Field(ge=0, le=1)]
PartialShare = Annotated[Float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """The base class of config sections. Sections are immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
    single: ClassVar[Mapping[str, tuple[type, ...]]] = {}
    """Keys that a value of these types, in place of the section, can stand for. A value with one meaning is used."""
    switch: ClassVar[str] = ""
    """What to do about `true` or `false` in place of the section."""


@dataclass(frozen=True)
class OneOf:
    """A validator that restricts a text to the names in a registry: `Annotated[str, OneOf(METHODS)]`."""

    registry: Registry[Any]

    def doc(self) -> str:
        """Return every name with its description, for the key's documentation."""
        return "; ".join(f"`{name}`: {self.registry.doc(name)}" for name in self.registry.names()) + "."

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._validate, core_schema.str_schema(strict=True))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.registry.names())}

    def _validate(self, name: str) -> str:
        if name not in self.registry.names():
            raise PydanticCustomError("not_in_registry", "unknown {kind}", {"kind": self.registry.kind})
        return name


MethodName = Annotated[str, OneOf(METHODS)]
OptimizerName = Annotated[str, OneOf(OPTIMIZERS)]
