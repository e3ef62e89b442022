"""Draw docs/img/engine.png, the picture of docs/engine.md: one step, and the engines that call it."""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "img" / "engine.png"
INK, GREY = "#222222", "#666666"
STEP, HOST, DEVICE, PANEL = "#fde3b5", "#e4e4e4", "#cfe3f7", "#f3f8fd"
CLIENTS = ("#f7b7a3", "#f9d48f", "#bfe0a8", "#a9d6e5", "#cdb9e6")

Point = tuple[float, float]


class Sheet:
    """A drawing in units of a tenth of an inch, the origin at the lower left."""

    def __init__(self, width: float, height: float) -> None:
        self.figure = Figure(figsize=(width / 10, height / 10))
        FigureCanvasAgg(self.figure)
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(0, height))
        self.axes.axis("off")

    def box(self, corner: Point, size: Point, text: str, fill: str = "white", points: float = 10) -> None:
        self.axes.add_patch(
            FancyBboxPatch(corner, *size, boxstyle="round,pad=0,rounding_size=0.7", fc=fill, ec=INK, lw=1)
        )
        middle = corner[0] + size[0] / 2, corner[1] + size[1] / 2
        self.axes.text(*middle, text, ha="center", va="center", fontsize=points, color=INK, linespacing=1.35)

    def panel(self, corner: Point, size: Point, title: str, fill: str = "white") -> None:
        self.axes.add_patch(Rectangle(corner, *size, fc=fill, ec=GREY, lw=1))
        self.say((corner[0] + 1.2, corner[1] + size[1] - 2.2), title, points=11, weight="bold")

    def say(self, at: Point, text: str, points: float = 9.5, weight: str = "normal", color: str = INK) -> None:
        self.axes.text(*at, text, fontsize=points, weight=weight, color=color, va="center", linespacing=1.35)

    def arrow(self, start: Point, end: Point, dashed: bool = False, bend: float = 0) -> None:
        style = {"arrowstyle": "-|>", "color": INK, "lw": 1.4, "ls": "--" if dashed else "-"}
        self.axes.annotate(
            "", end, start, arrowprops={**style, "shrinkA": 0, "shrinkB": 0, "connectionstyle": f"arc3,rad={bend}"}
        )

    def tile(self, corner: Point, size: Point, client: int, text: str = "") -> None:
        """Something of one client, in its colour."""
        self.axes.add_patch(Rectangle(corner, *size, fc=CLIENTS[client], ec=INK, lw=0.8))
        middle = corner[0] + size[0] / 2, corner[1] + size[1] / 2
        self.axes.text(*middle, text, ha="center", va="center", fontsize=9, color=INK)


def draw_step(sheet: Sheet) -> None:
    sheet.box(
        (2, 66), (42, 11),
        "one step of one client   (core/step.py)\n"
        "step(carry, batch, numbers)  $\\rightarrow$  carry, seen\n"
        "written once: loss, gradient, rule of the method, update",
        STEP,
    )  # fmt: skip


def draw_callers(sheet: Sheet) -> None:
    """The engines that call the step for one client after the other."""
    sheet.arrow((14, 66), (14, 61.6))
    sheet.say((15.5, 63.8), "called as it is (by ranks: or mapped)", color=GREY)
    sheet.panel((2, 47.5), (42, 14), "sequential: the reference")
    for place in range(5):
        sheet.tile((4 + 7.8 * place, 50.2), (5.6, 4), place, f"{place}")
        if place:
            sheet.arrow((4 + 7.8 * place - 2.2, 52.2), (4 + 7.8 * place, 52.2))
    sheet.panel((2, 28), (42, 17.5), "workers: the same code in CPU processes")
    for row, clients in enumerate(((0, 2, 4), (1, 3))):
        y = 35.8 - 6 * row
        sheet.say((4, y + 2), f"process {row}")
        for place, client in enumerate(clients):
            sheet.tile((14 + 9.2 * place, y), (7.4, 4), client, f"{client}")
    sheet.panel((2, 2), (42, 24), "ranks: several GPUs or hosts (torchrun)")
    for rank, clients in enumerate(((0, 1, 2), (3, 4))):
        x = 4 + 21 * rank
        sheet.box((x, 10), (17, 11), "")
        sheet.say((x + 1, 18.8), f"rank {rank}: its clients,\nsequential or stacked", 9)
        for place, client in enumerate(clients):
            sheet.tile((x + 1 + 5.2 * place, 11.2), (4.4, 4), client, f"{client}")
    sheet.arrow((21, 13.4), (25, 13.4))
    sheet.arrow((25, 13.4), (21, 13.4))
    sheet.say((4, 5.6), "between ranks: reports, sums of merges,\nlocal state on its way to rank 0's disk", color=GREY)


def draw_stack(sheet: Sheet) -> None:
    """The step mapped over clients, whose states are the rows of a matrix."""
    sheet.arrow((44, 71.5), (60, 71.5))
    sheet.say((46.6, 73.4), "torch.vmap", points=10.5, weight="bold")
    for place in range(5):
        sheet.tile((60, 75 - 2.6 * place), (22, 2.6), place, f"client {place}")
    sheet.say((84, 73.6), "stacked: a row a client, one step for all", points=10.5, weight="bold")
    sheet.say(
        (84, 69.2), "a convolution or batch norm of the stack is one\noperator: reference in torch, kernel in Triton"
    )
    sheet.arrow((71, 64.6), (71, 60.4))
    sheet.say((72.5, 62.4), "traced, fused, captured as a CUDA graph", color=GREY)


def draw_round(sheet: Sheet) -> None:
    """A round as programs over state that stays on the device."""
    sheet.panel((48, 33), (80, 27), "a round on the GPU (PhaseProgram): three programs over named tensors", PANEL)
    boxes = (("start", "server's, own or\nfresh state"), ("step", "gather, augment,\nforward, backward,\nupdate"))
    for place, (name, text) in enumerate((*boxes, ("merge", "weigh, sum,\nserver's rule,\nreport"))):
        sheet.box((51 + 26 * place, 43.5), (20, 11), f"$\\bf{{{name}}}$\n{text}", DEVICE, 9.5)
        if place:
            sheet.arrow((51 + 26 * place - 6, 49), (51 + 26 * place, 49))
    sheet.arrow((94, 43.5), (80, 43.5), bend=-0.35)
    sheet.say((86, 39.9), "E times", color=GREY)
    for place, text in enumerate(("server: a row a run", "local state: a row a client", "log of reports")):
        sheet.box((51 + 26 * place, 34.4), (22, 3.4), text, "white", 9)


def draw_time(sheet: Sheet) -> None:
    """The host runs ahead of the device and looks back late."""
    sheet.panel((48, 2), (80, 27.5), "in time: the host runs ahead, the GPU waits for no answer")
    for name, y in (("host", 19.2), ("GPU", 8.6)):
        sheet.say((50, y + 2), name, points=10, weight="bold")
    for turn in range(6):
        x = 56 + 5.2 * turn
        sheet.box((x, 19.2), (4.4, 4), f"$m_{turn + 1}$", HOST, 9)
        start = 60.5 + 8.4 * turn
        sheet.box((start, 8.6), (8.2, 4), f"round {turn + 1}", DEVICE, 8.5)
        sheet.arrow((x + 2.2, 19.2), (start + 1, 12.6))
    sheet.box((112, 19.2), (14, 4), "read all reports", HOST, 9)
    sheet.arrow((111, 10.6), (117.5, 19.2), dashed=True)
    sheet.say((88.5, 21.2), "$m$: rows of batches, keys, draws,\nlearning rates, who takes part", 9, color=GREY)
    sheet.say(
        (56, 4.8),
        "reports are read in bursts; then metrics, a look for divergence, a checkpoint if one is due",
        color=GREY,
    )


def main(arguments: list[str]) -> int:
    sheet = Sheet(130, 80)
    for draw in (draw_step, draw_callers, draw_stack, draw_round, draw_time):
        draw(sheet)
    sheet.figure.savefig(arguments[0] if arguments else PICTURE, dpi=130, facecolor="white")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
