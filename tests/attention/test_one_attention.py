"""Attention is written in one place: where weights may be multiplied with values is frozen here.

Whoever needs attention calls `attend`; a faster way to compute it is an entry of KERNELS. If a test
here fails, either do that, or add the place with the reason why it is none.
"""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import regard

ROOT = Path(regard.__file__).resolve().parent

# functions that multiply a softmax with something, and why they may
PRODUCTS = {
    "attention/kernels.py:_average": "plain and given: the implementations with all weights",
    "attention/kernels.py:products": "an implementation of the table",
    "attention/kernels.py:small_query": "an implementation of the table",
    "decode/search.py:keep_min_p": "min_p: a fraction of the largest probability of a token",
    "decode/search.py:__call__": "sampling: a fraction of the sum of the probabilities of tokens",
    "metrics/mixture.py:choose": "a mean over pairs of weights by how likely each is",
    "gallery/softmax.py:draw_scaling": "scores are scaled before the softmax, for a picture",
    "gallery/softmax.py:entropy": "p log p, for a picture",
}
# functions that call a fused kernel of attention
FUSED = {
    "attention/kernels.py:fused": "the implementation of the table",
    "costs/count.py:attend": "stands for that call where there are shapes but no numbers",
}

KERNELS = {"scaled_dot_product_attention", "flex_attention", "multi_head_attention_forward"}
KERNELS |= {"MultiheadAttention", "_native_multi_head_attention"}
SOFTMAX = {"softmax", "_softmax", "_safe_softmax", "attention_weights"}
MULTIPLY = {"matmul", "bmm", "mm", "baddbmm", "addmm", "addbmm", "einsum", "tensordot", "mv", "dot"}
MULTIPLY |= {"mul", "mul_", "multiply", "addcmul", "addcmul_", "linear"}


def called(node: ast.AST) -> str:
    """Return the name of what a call calls, without where it is."""
    if not isinstance(node, ast.Call):
        return ""
    target = node.func
    return target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")


class Function(ast.NodeVisitor):
    """Follows what comes from a softmax through one function, to the products it is part of."""

    def __init__(self, node: ast.AST, tainted: set[str]):
        self.tainted, self.products, self.returns = set(tainted), False, False
        self.passed: list[tuple[str, int]] = []  # to which argument of which function
        for _ in range(3):  # names may be used before they are assigned, in loops
            for child in ast.iter_child_nodes(node):
                self.visit(child)

    def comes_from(self, node: ast.AST | None) -> bool:
        """Tell whether a value is computed from a softmax."""
        if node is None or isinstance(node, ast.Lambda):
            return False
        for part in ast.walk(node):
            if called(part) in SOFTMAX or (isinstance(part, ast.Name) and part.id in self.tainted):
                return True
        return False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:  # noqa: N802
        """Leave inner functions to themselves: they are in the list, too."""

    def visit_Assign(self, node: ast.Assign) -> None:  # noqa: N802
        """Follow a value to its name."""
        self.generic_visit(node)
        if self.comes_from(node.value) and called(node.value) not in ("argmax", "size", "len"):
            for target in node.targets:
                names = [part.id for part in ast.walk(target) if isinstance(part, ast.Name)]
                self.tainted.update(names)

    def visit_Return(self, node: ast.Return) -> None:  # noqa: N802
        """Note that a function returns what comes from a softmax."""
        self.generic_visit(node)
        self.returns = self.returns or self.comes_from(node.value)

    def visit_BinOp(self, node: ast.BinOp) -> None:  # noqa: N802
        """Note a product, but with a plain number."""
        self.generic_visit(node)
        number = any(isinstance(x, ast.Constant) for x in (node.left, node.right))
        if isinstance(node.op, ast.MatMult | ast.Mult) and not number:
            self.products |= self.comes_from(node.left) or self.comes_from(node.right)

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """Note a product by name, and what is passed on."""
        self.generic_visit(node)
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        if called(node) in MULTIPLY:
            self.products |= any(map(self.comes_from, [of, *arguments]))
        for place, argument in enumerate(node.args):
            if self.comes_from(argument):
                self.passed.append((called(node), place))


def functions(tree: ast.AST) -> dict[str, ast.FunctionDef]:
    """Return all functions of a file, inner ones too."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name: node for node in ast.walk(tree) if isinstance(node, kinds)}  # type: ignore


def products(source: str) -> set[str]:
    """Return the functions of a file in which something from a softmax is multiplied."""
    if not re.search(rf"\b({'|'.join(SOFTMAX)})\(", source):
        return set()
    known = functions(ast.parse(source))
    tainted: dict[str, set[str]] = {name: set() for name in known}
    found: set[str] = set()
    for _ in range(4):  # until what is passed on has arrived
        for name, node in known.items():
            followed = Function(node, tainted[name])
            if followed.products:
                found.add(name)
            for other, place in followed.passed:
                names = [arg.arg for arg in known[other].args.args] if other in known else []
                names = names[1:] if names[:1] == ["self"] else names
                tainted.get(other, set()).update(names[place : place + 1])
    return found


def calls(source: str, names: set[str], but: tuple[str, ...] = ()) -> set[str]:
    """Return the innermost functions of a file that call one of some names, but of some modules."""
    found: set[str] = set()

    def visit(node: ast.AST, inside: str) -> None:
        inside = node.name if isinstance(node, ast.FunctionDef) else inside
        of = getattr(getattr(node, "func", None), "value", None)
        if called(node) in names and getattr(of, "id", None) not in but:
            found.add(inside)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), "<module>")
    return found


def fused(source: str) -> set[str]:
    """Return the functions of a file that call a fused kernel of attention."""
    return calls(source, KERNELS)


def places(scan: Callable[[str], set[str]]) -> set[str]:
    """Return all places of the package that a scan finds."""
    return {
        f"{path.relative_to(ROOT)}:{function}"
        for path in ROOT.rglob("*.py")
        for function in scan(path.read_text())
    }


def test_a_softmax_is_multiplied_with_values_in_one_file():
    assert places(products) == PRODUCTS.keys()


def test_fused_kernels_are_called_in_one_place():
    assert places(fused) == FUSED.keys()


WRITTEN = {
    "a product": "def f(q, k, v):\n    return (q @ k.mT).softmax(-1) @ v",
    "named weights": "def f(q, k, v):\n    w = F.softmax(q @ k.mT, -1)\n    return torch.bmm(w, v)",
    "masked weights": """
def f(q, k, v, mask):
    weights = torch.softmax(q @ k.mT, dim=-1)
    weights = weights.masked_fill(mask, 0)
    kept = self.dropout(weights)
    return torch.einsum("bqk,bkd->bqd", kept, v)""",
    "a helper": """
def average(weights, v):
    return weights @ v
def f(q, k, v):
    return average((q @ k.mT).softmax(-1), v)""",
    "a method": """
class Layer:
    def mix(self, weights, v):
        return weights.matmul(v)
    def forward(self, q, k, v):
        return self.mix(nn.functional.softmax(q @ k.mT, -1), v)""",
    "an inner function": "def f(q):\n    def g(v):\n        return q.softmax(1) @ v\n    return g",
    "a weighted sum": "def f(s, v):\n    return s.softmax(-1).unsqueeze(-1).mul(v).sum(-2)",
    "a starred product": "def f(s, v):\n    w = s.softmax(1)\n    return (w[:, None] * v).sum(1)",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_attention_that_is_written_elsewhere_is_found(name: str):
    assert products(WRITTEN[name])


def test_what_is_no_attention_is_not_found():
    assert not products("def f(x, w):\n    y = x @ w\n    return 100 * y.softmax(-1).max()")
    assert fused("x = torch.nn.functional.scaled_dot_product_attention(q, k, v)") == {"<module>"}
