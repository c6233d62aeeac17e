"""A torch without one of its private names costs the feature that needs it, never the import."""

from __future__ import annotations

import ast
import inspect

import fresh
import pytest
import torch
from helpers import one_in

from flexmasks import compat


def is_private(path: str) -> bool:
    return "._" in path or ":_" in path


PATHS = sorted(path for path, _ in compat.NAMES.values() if is_private(path))
REFUSING = {path for path, without in compat.NAMES.values() if is_private(path) and isinstance(without, str)}
# Private names that are not looked up in a module: a mark for functions that torch.compile takes for constants, a
# counter that changes, and attributes of process groups.
ATTRIBUTES = {"_dynamo_marked_constant", "_current_level", "_get_backend", "_timeout"}

# It takes a name away before flexmasks asks for it, and runs what must still work.
_WITHOUT = """
import operator, sys
path = sys.argv[1]
module, _, taken = path.partition(":")
if not taken:
    sys.modules[module] = None

class attrgetter:
    def __init__(self, name):
        self.name, self.get = name, real(name)

    def __call__(self, found):
        if self.name == taken and getattr(found, "__name__", None) == module:
            raise AttributeError(taken)
        return self.get(found)

real, operator.attrgetter = operator.attrgetter, attrgetter
import torch
import flexmasks

assert len(flexmasks.list_masks()) > 40
flexmasks.show("causal", 64)
blocks = flexmasks.block_mask("sliding_window", 300, window=20)
assert blocks.kv_num_blocks.flatten().tolist() == [1, 2, 2]
blocks = flexmasks.block_mask("document", 300, document_ids=torch.arange(300) // 128)
assert blocks.full_kv_num_blocks.flatten().tolist() == [1, 1, 0]
assert blocks.kv_num_blocks.flatten().tolist() == [0, 0, 1]
q, k, v = torch.randn(3, 1, 2, 40, 16, dtype=torch.float64)
want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
q.requires_grad_()
out = flexmasks.attention(q, k, v, mask="causal", backend="reference")
assert torch.allclose(out, want)
out.sum().backward()
ids = torch.arange(40) // 9
score = lambda s, b, h, q, kv: s
out = flexmasks.attention(q, k, v, mask="document", document_ids=ids, score=score, backend="reference")
visible = ids[:, None] == ids
assert torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, visible))
out.sum().backward()
from flexmasks import compat

def refuses(call):
    try:
        call()
    except (compat.MissingFromTorch, ValueError) as error:  # the reason that a backend refuses stands in a ValueError
        assert path.replace(":", ".") in str(error) and "Install a torch" in str(error), error
        return
    raise AssertionError("it is not refused")

"""

# What needs a name, and refuses in words without it. The other names have something public in their place.
_TRANSFORMED = """
ids = torch.arange(40) // 9
call = lambda q: flexmasks.attention(q, k, v, mask='document', document_ids=ids, backend='reference').sum()
refuses(lambda: torch.func.grad(call)(q.detach()))
"""
_MADE_INSIDE = """
call = lambda q: flexmasks.attention(q, k, v, mask='document', document_ids=torch.arange(40) // 9).sum()
refuses(lambda: torch.func.grad(call)(q.detach()))
"""
_DENSE = """
x = q.detach().float().requires_grad_()
refuses(lambda: flexmasks.attention(x, x, x, mask='causal', score='alibi', backend='short').sum().backward())
"""
_LOOK = """
from flexmasks.plans import data
data._CAPACITIES = (0,)
mask = lambda b, h, q, kv: (q - kv) % 3 == 0
q, k, v = (x.detach().float() for x in (q, k, v))
refuses(lambda: flexmasks.attention(q, k, v, mask=mask, backend='flex'))
"""
_SIZES = """
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from flexmasks.plans import checks
shapes = ShapeEnv()
m, n = shapes.create_unbacked_symint(), shapes.create_unbacked_symint()
refuses(lambda: checks._broadcasts(m, n))
"""
_EXCHANGE = """
from flexmasks.integrations.distributed import exchange
refuses(lambda: exchange.all_to_all_single(torch.zeros(2), [2], [2], None))
"""
_SELECTIVE = """
import functools
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
saving = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
q, k, v = (x.detach().float() for x in (q, k, v))
call = lambda q: flexmasks.attention(q, k, v, mask='causal', backend='sdpa').sum()
refuses(lambda: checkpoint(call, q.requires_grad_(), use_reentrant=False, context_fn=saving))
"""
REFUSED = {
    "torch._C._functorch:get_interpreter_stack": _TRANSFORMED,
    "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack": _TRANSFORMED,
    "torch._C._functorch:get_unwrapped": _MADE_INSIDE,
    "torch:_check": _SIZES,
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu": _DENSE,
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": _DENSE,
    "torch._inductor.decomposition:select_decomp_table": _LOOK,
    "torch._subclasses.fake_tensor:FakeTensorMode": _LOOK,
    "torch.distributed._functional_collectives:all_to_all_single_autograd": _EXCHANGE,
    "torch.utils._python_dispatch:TorchDispatchMode": _LOOK,
    "torch.utils._python_dispatch:_disable_current_modes": _SELECTIVE,
    "torch.utils._python_dispatch:_get_current_dispatch_mode_stack": _SELECTIVE,
}


@pytest.mark.parametrize("path", one_in(12, PATHS))
def test_a_torch_without_a_name(path: str) -> None:
    ran = fresh.run(_WITHOUT + REFUSED.get(path, ""), path)
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_every_text_is_an_error_of_a_call() -> None:
    assert set(REFUSED) == REFUSING


def test_few_private_names() -> None:
    assert len({*PATHS, *ATTRIBUTES}) <= 47


def test_torch_without_the_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their absence means that nothing is known: no forward derivatives, and torch's own timeout."""
    monkeypatch.delattr(torch.autograd.forward_ad, "_current_level")
    assert not compat.in_forward_derivative()
    assert compat.group_timeout(object()) is None


def test_names_are_looked_up_at_their_first_use() -> None:
    ran = fresh.run("import flexmasks; print(*(vars(flexmasks.compat).keys() & flexmasks.compat.NAMES.keys()))")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split() == ["register_pytree_node"]  # masks are nodes before anybody looks at trees


def test_torch_has_all_names() -> None:
    """A torch that flexmasks is tested with has them, but for the GPU's on a build for CPUs."""
    lacks = set()
    for name, (path, without) in compat.NAMES.items():
        value = compat.named(name)
        if value is without or isinstance(value, compat._Missing):
            lacks.add(path)
    assert lacks <= (set() if torch.version.cuda else {"torch._C:_cuda_getCurrentRawStream"})


def test_all_private_names_are_listed() -> None:
    """Apart from NAMES, compat reads no private name of torch but the listed ones."""
    tree = ast.parse(inspect.getsource(compat))
    ours = {"_C", "_refuse", "_says", *vars(compat)}  # of torch._C, the documented DisableTorchFunctionSubclass is read
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            found |= {a.value for a in node.args[1:2] if isinstance(a, ast.Constant)}
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "attrgetter":
            found |= {a.value for a in node.args if isinstance(a, ast.Constant)}
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "named":
            name = node.args[0]
            assert isinstance(name, ast.Name) or (isinstance(name, ast.Constant) and name.value in compat.NAMES)
    private = {name for name in found if name.startswith("_") and not name.startswith("__")}
    assert private - ours == ATTRIBUTES
