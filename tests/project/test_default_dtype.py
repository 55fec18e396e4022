"""Tensors have a stated dtype: users and vLLM change torch's default one."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_FLOATS = "empty", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros"


def states_a_dtype(call: ast.Call) -> bool:
    return any(keyword.arg in ("dtype", None) for keyword in call.keywords)


def test_no_tensor_has_torchs_default_dtype():
    made, without = 0, []
    for package in ("kvloom", "kvloom-vllm"):
        for path in (ROOT / "packages" / package / "src").rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                if ast.unparse(node.func).removeprefix("torch.") in OF_FLOATS:
                    made += 1
                    if not states_a_dtype(node):
                        without.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert made > 50
    assert not without, without
