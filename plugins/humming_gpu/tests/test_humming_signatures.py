"""Each call into humming-kernels fits the installed package, by reading its source: importing it needs a GPU's libraries."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from int8moe_humming_gpu import conversion, experts

if find_spec("humming") is None:
    pytest.skip("humming-kernels is not installed", allow_module_level=True)

PACKAGE = Path(next(iter(find_spec("humming").submodule_search_locations)))

# what is called: (file of the package, class or "", function)
CALLED = {
    "humming_forward": ("forward.py", "", "humming_forward"),
    "prepare_layer_config": ("transform.py", "", "prepare_layer_config"),
    "transform_humming_tensors": ("transform.py", "", "transform_humming_tensors"),
    "convert_humming": ("schema/base.py", "BaseWeightSchema", "convert_humming"),
    "to_humming_schema": ("schema/compressed_tensors.py", "CompressedTensorsWeightSchema", "to_humming_schema"),
}


def definition(file: str, owner: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    body = ast.parse((PACKAGE / file).read_text()).body
    for word in (owner, name) if owner else (name,):
        node = next(n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == word)
        body = node.body
    return node


def calls() -> list[tuple[str, ast.Call]]:
    found = []
    for module in (conversion, experts):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in CALLED:
                    found.append((name, node))
    return found


def test_every_call_is_looked_at() -> None:
    assert {name for name, _ in calls()} == set(CALLED)


@pytest.mark.parametrize(("name", "call"), calls(), ids=lambda value: value if isinstance(value, str) else "")
def test_call_fits(name: str, call: ast.Call) -> None:
    function = definition(*CALLED[name])
    assert isinstance(function, ast.FunctionDef)
    names = [argument.arg for argument in function.args.args if argument.arg != "self"]
    given = names[: len(call.args)] + [keyword.arg for keyword in call.keywords]
    assert len(given) == len(set(given))
    assert set(given) <= set(names), f"{name} has no {set(given) - set(names)}"
    required = set(names[: len(names) - len(function.args.defaults)])
    assert required <= set(given), f"{name} wants {required - set(given)}"


@pytest.mark.parametrize(
    ("owner", "schema"),
    [
        ("CompressedTensorsWeightSchema", conversion.WEIGHT_SCHEMA),
        ("CompressedTensorsInputSchema", conversion.INPUT_SCHEMA),
    ],
)
def test_schemas_have_these_fields(owner: str, schema: dict[str, object]) -> None:
    node = definition("schema/compressed_tensors.py", "", owner)
    fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}
    required = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and n.value is None}
    assert set(schema) <= fields
    assert required <= set(schema)


def test_the_kind_of_gemm_exists() -> None:
    node = definition("config/enum.py", "", "GemmType")
    values = {n.value.value for n in node.body if isinstance(n, ast.Assign)}
    assert experts._GROUPED["gemm_type"] in values
