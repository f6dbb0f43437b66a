"""A toy decoder end to end: its contract, its graph before and after one rewrite, and its bits against stock's.

python examples/walkthrough.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import cadence_fx
from cadence_fx import Arg, Call, Clock, Contract, Input, KeepEnds, Region, Result
from cadence_fx.bits import first_difference

WIDTH, HEADS, PROMPT, TAIL, CHUNK = 16, 2, 6, 4, 2


class ToyDecoder(nn.Module):
    """Attention over [new rows | old rows]; the first six and the last four rows are kept, as Token2Wav keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("span", torch.linspace(0, 1, WIDTH))

    def forward(self, x: torch.Tensor, state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows = self.qkv(x * torch.cos(self.span))
        q, k_new, v_new = rows.unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(3, dim=-1)
        k_old, v_old = state["kv"].chunk(2, dim=-1)
        k, v = torch.cat([k_new, k_old], dim=2), torch.cat([v_new, v_old], dim=2)
        y = F.scaled_dot_product_attention(q, k, v)
        kv = torch.cat([k, v], dim=-1)
        if kv.shape[2] > PROMPT + TAIL:
            kv = torch.cat([kv[:, :, :PROMPT], kv[:, :, -TAIL:]], dim=2)
        return self.out(y.transpose(1, 2).flatten(2)), {"kv": kv}


CONTRACT = Contract(
    "toy",
    clocks=(Clock("frame", hz=50),),
    regions=(
        Region(
            "kv", (1, HEADS, None, 2 * WIDTH // HEADS), dim=2, clock="frame", start=PROMPT, order="new_first",
            retain=KeepEnds(PROMPT, TAIL), enters=Arg("state", "kv"), leaves=Result(1, "kv"),
        ),
    ),
    inputs=(Input(Arg("x"), (1, None, WIDTH)),),
    calls=(Call("chunk", ticks={"frame": CHUNK}, sizes={"x": (CHUNK,)}, steady=True),),
)  # fmt: skip


def show(title: str, graph: torch.fx.Graph) -> None:
    """What joins, attends to and moves state: one line an operator, with its shape and inputs."""
    print(f"\n{title}")
    for node in graph.nodes:
        if str(node.target).split(".")[1:2] in (["cat"], ["copy_"], ["scaled_dot_product_attention"]):
            print(f"  {node.name}: {node.meta['val']} = {node.target}({', '.join(map(str, node.args))})")


def main() -> None:
    torch.manual_seed(0)
    decoder = ToyDecoder().eval()

    print("1. What the declaration alone decides (no module, no GPU)")
    (kv,) = cadence_fx.explain(None, CONTRACT).regions
    print(f"  {kv.region}: reads {list(kv.attended)} rows, never holds more than {kv.envelope}, so {kv.width} shapes")

    print("\n2. The module that replaces it; the one passed in stays as it was")
    fast = cadence_fx.transform(decoder, CONTRACT)
    fast.warmup()
    graphs = fast.graphs
    show("as traced, longest state: the whole state is rebuilt", graphs["before"].graph)
    show("rewritten: only rows that are new or move are copied", graphs["after:eliminate_dead"].graph)
    for title, notes in (("rewritten", fast.report.rewrites), ("left alone", fast.report.rejections)):
        print(f"\n{title}: {len(notes) or 'nothing'}")
        for note in notes:
            print(f"  {note}")

    print("\n3. Ten chunks against stock, raw bits compared")
    start = {"kv": torch.randn(1, HEADS, PROMPT, 2 * WIDTH // HEADS)}
    theirs, ours = start, {"kv": start["kv"].clone()}
    addresses = set()
    for i in range(10):
        x = torch.randn(1, CHUNK, WIDTH)
        expected, theirs = decoder(x, theirs)
        found, ours = fast(x, ours)
        difference = first_difference(f"chunk {i}", (expected, theirs), (found, ours))
        if difference is not None:
            raise SystemExit(str(difference))
        addresses.add(ours["kv"].untyped_storage().data_ptr())
    print("  output and state are equal in every bit")
    print(f"  the state was at {len(addresses)} address")
    counts = fast.stats()
    print(f"  {counts['calls']} calls: {counts['plan']} from the plan, {counts['stock']} as stock")


if __name__ == "__main__":
    with torch.no_grad():
        main()
