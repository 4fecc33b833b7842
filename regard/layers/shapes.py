"""Shapes of tensors by name, for signatures."""

from jaxtyping import Float, Int
from torch import Tensor

Size = tuple[int, int]  # height and width
Images = Float[Tensor, "b c y x"]
Vectors = Float[Tensor, "b l w"]
Ids = Int[Tensor, "b l"]  # of tokens
Lengths = Int[Tensor, " b"]  # of texts, without padding
