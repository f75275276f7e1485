"""What every group of keys is made of: a frozen branch, and values that stay what they were written as."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict

Auto = Literal["auto"]
Whole = Annotated[int, Strict()]
Real = Annotated[float, Strict()]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Field(min_length=1)]


class Branch(BaseModel):
    """A group of keys: frozen, and closed to keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
