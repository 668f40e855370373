"""The gallery: draws every picture of this folder and writes its index.

    python viz/make.py            draw what has changed
    python viz/make.py --check    only say what is not up to date

``fresh.json`` keeps, per picture, a hash of the DOT text it was painted from and one of the file, so that a test
can tell whether the pictures show what pipec draws today, whatever Graphviz painted them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import frozen

import pipec
from pipec.render import Picture, draw
from pipec.schedules import ASYNCHRONOUS, REGISTRY, SCHEDULES

HERE = Path(__file__).resolve().parent
FRESH = HERE / "fresh.json"
DEVICES, MICROBATCHES = 4, 8
SLICES = {"seq-1f1b": 2}
MIB = 2**20


@frozen
class Entry:
    """A picture: its file's name, a heading, two sentences, when to use what it shows, and how it is drawn."""

    name: str
    heading: str
    text: str
    use: str
    make: Callable[[], Picture]
    png: bool = False


def unet() -> pipec.Pipeline:
    """A U-Net of seven stages whose three skips cross from the encoder to the decoder."""
    net = pipec.Pipeline("U-Net")
    image, target = net.input("image"), net.input("target")
    enc1 = net.stage("enc1", None, image)
    enc2 = net.stage("enc2", None, enc1)
    enc3 = net.stage("enc3", None, enc2)
    middle = net.stage("middle", None, enc3)
    dec3 = net.stage("dec3", None, middle, pipec.skip(enc3))
    dec2 = net.stage("dec2", None, dec3, pipec.skip(enc2))
    dec1 = net.stage("dec1", None, dec2, pipec.skip(enc1))
    net.output(dec1)
    net.loss("mse", None, dec1, target)
    return net


def skip_plan() -> pipec.Plan:
    """A chain of three with a skip over the middle, a stage a device."""
    net = pipec.Pipeline("skip")
    a = net.stage("a", None, net.input("x"))
    b = net.stage("b", None, a)
    net.loss("loss", None, net.stage("c", None, b, pipec.skip(a)))
    return pipec.compile(net, 3, 3, "1f1b")


def skip_costs() -> pipec.Costs:
    """A copy takes half a forward."""
    return pipec.Costs(forward=2.0, backward_input=2.0, backward_weight=2.0, bandwidth=MIB,
                       stages={name: {"output_bytes": MIB, "activation_bytes": MIB} for name in "abc"})


def unet_costs(**more: float) -> pipec.Costs:
    """Outer stages hold large images at little work, inner ones small images at much work."""
    sizes = {"enc1": 8, "enc2": 4, "enc3": 2, "middle": 1, "dec3": 2, "dec2": 4, "dec1": 8}
    stages = {name: {"output_bytes": mib * MIB, "activation_bytes": 3 * mib * MIB} for name, mib in sizes.items()}
    return pipec.Costs(unit="ms", stages=stages, **more)


def unet_plan(microbatches: int = 6) -> pipec.Plan:
    return pipec.compile(unet(), 4, microbatches, costs=unet_costs(latency=0.2), update="stage")


def schedule_plan(name: str, **options: str) -> pipec.Plan:
    """Equal work for every schedule: two unit stages a device where chunks are looped, else one of double cost."""
    if name in ASYNCHRONOUS:
        return asynchronous_plan(name)
    looped = getattr(REGISTRY[name](), "placement", "linear") != "linear"
    stages, cost = (2 * DEVICES, 1.0) if looped else (DEVICES, 2.0)
    costs = pipec.Costs(cost, cost, cost)
    slices = SLICES.get(name, 1)
    chain = pipec.chain(stages, carry=slices > 1)
    return pipec.compile(chain, DEVICES, MICROBATCHES, name, slices=slices, costs=costs, **options)


def asynchronous_plan(schedule: Any, devices: int = DEVICES) -> pipec.Plan:
    """A stage a device, four microbatches a minibatch."""
    return pipec.compile(
        pipec.chain(devices), devices, DEVICES, schedule, update="stage", costs=pipec.Costs(2.0, 2.0, 2.0)
    )


# What a reader should know of each schedule; one that is missing here shows its own description.
WORDS = {
    "gpipe": (
        "All forwards run first, then all backwards. Simple, but every device keeps the activations of all "
        "microbatches until the backwards begin.",
        "as a start, for few microbatches, or with recompute, which makes the activations small.",
    ),
    "1f1b": (
        "As soon as the first backward can run, each device does one backward and one forward in turn. The bubble is "
        "GPipe's, but device s of P keeps at most P - s activations however many microbatches there are.",
        "by default: it never needs more memory than GPipe and is never slower when hand-overs are free.",
    ),
    "eager-1f1b": (
        "1F1B that runs about twice as many forwards ahead. A device then has work while activations and gradients "
        "travel, for about twice the activations.",
        "when the hand-over between devices takes a noticeable part of a task and memory allows it.",
    ),
    "seq-1f1b": (
        "1F1B over slices of sequences, here two per microbatch, 3 and 3.1: a causal model runs them one after "
        "another, and their backwards in reverse. Half the bubble, and little more than half the activations.",
        "for long sequences, of which there are few.",
    ),
    "interleaved-1f1b": (
        "Every device holds several chunks of the model (light and dark) and a microbatch goes round the devices once "
        "per chunk. The bubble shrinks by the number of chunks; copies grow by as much.",
        "when there are few microbatches per device and the links are fast.",
    ),
    "looped-bfs": (
        "Looped chunks as in interleaved 1F1B, but all microbatches pass a chunk before the next chunk begins. The "
        "small bubble of looping, the memory of GPipe, and long runs of one chunk that hide communication.",
        "with sharded weights that are gathered once per chunk, or with recompute.",
    ),
    "wave": (
        "The chunks of a device lie in a V: a microbatch runs down the devices and back up, so the last device hands "
        "over to itself. Two thirds of 1F1B's bubble in its memory, with whole backwards.",
        "when the first and last stages belong together, as with tied embeddings, and backwards cannot be split.",
    ),
    "zb-h1": (
        "1F1B whose backwards are cut in two: the input half goes to the device before at once, the weight half waits "
        "and fills the bubble. A third of 1F1B's bubble in its memory.",
        "in place of 1f1b when the bubble hurts and memory is tight.",
    ),
    "zb-h2": (
        "ZB-H1 with about twice the forwards ahead: no device waits between its first and its last task.",
        "when activations are small and steps follow each other without a barrier.",
    ),
    "zb-1p": (
        "Split backwards in 1F1B's memory, ordered by the costs you give instead of by a fixed pattern.",
        "when stages are unequal, or forward, input half and weight half cost differently.",
    ),
    "zb-2p": (
        "The same with twice the memory, which removes nearly all of the bubble.",
        "when activations are small and costs are known.",
    ),
    "interleaved-zero-bubble": (
        "Looped chunks with split backwards: looping divides the bubble by the chunks per device, the weight halves "
        "fill most of the rest, and no more than P activations are held.",
        "for looped models when interleaved 1F1B takes too much memory.",
    ),
    "zb-v": (
        "Two chunks per device in a V with split backwards: every device starts late and ends late by the same, and "
        "is never idle between, in 1F1B's memory. Devices hold equally much.",
        "when the model has two chunks per device to give: it is the fastest in 1F1B's memory.",
    ),
    "v-half": (
        "ZB-V under a cap of about half of 1F1B's activations: a slower rhythm, a small bubble.",
        "when 1F1B's memory is too much; recompute would cost more.",
    ),
    "pipedream": (
        "1F1B without a flush: minibatches of four microbatches follow each other, and every device updates as soon as "
        "it has a minibatch's gradients. Under each number stands the weight version that the task reads; purple "
        "ticks are updates, and the blue borders end the steps, of which two steady ones are drawn. Backwards read the "
        "version of their forward.",
        "for few stages, when gradients must be exact for the weights they were taken at.",
    ),
    "pipedream-2bw": (
        "The same order, but all tasks of a minibatch read one version on all devices: the one before the newest "
        "finished. Two versions are kept, and every gradient is one update late, no more.",
        "when a minibatch has at least as many microbatches as there are devices.",
    ),
    "pipemare": (
        "Twice the microbatches under way and one weight version: forwards and backwards read the newest weights, "
        "and backwards correct them by their mean change. Each tick of a device is a backward and a forward.",
        "for many stages, when memory for weights is tight.",
    ),
    "predicted": (
        "1F1B without a flush; forwards read the weights that their backward is expected to find, predicted from the "
        "optimizer's momentum.",
        "with an optimizer that has momentum.",
    ),
    "live-weights": (
        "1F1B without a flush on whatever weights are there. With many microbatches a minibatch few updates come "
        "between a forward and its backward.",
        "when a minibatch has at least as many microbatches as there are devices.",
    ),
    "nesterov": (
        "1F1B without a flush on stashed weights; the update looks ahead along the last change of the weights.",
        "where SGD with momentum would be used.",
    ),
    "v-min": (
        "ZB-V under a cap of about a third of 1F1B's activations, for about its bubble.",
        "when memory is what limits the model.",
    ),
    "dualpipe-v": (
        "A V in which forwards and backwards of different microbatches meet: framed pairs run as one task, so that "
        "each hides the communication inside the other. Here a pair costs what its two tasks cost.",
        "when stages communicate inside, as experts do, and a fused forward and backward pays.",
    ),
}


def schedule_entry(name: str) -> Entry:
    what = (type(SCHEDULES[name]()).__doc__ or "").split("\n\n")[0].replace("\n    ", " ")
    text, use = WORDS.get(name, (what, "see the page about schedules."))
    return Entry(f"schedule-{name}", name, text, use, lambda: draw(schedule_plan(name)))


def entries() -> list[Entry]:
    """Every picture of the gallery, in the order of the index."""
    return [
        Entry(
            "unet",
            "A U-Net with skips",
            "Seven stages on four devices under 1f1b. Arrows are copies between devices; dashed ones are skips, "
            "which go straight from their encoder stage to the decoder stage that reads them.",
            "whenever you want to see what a plan does before you rent the devices.",
            lambda: draw(unet_plan(), copies=True),
            png=True,
        ),
        Entry(
            "unet-stages",
            "The same U-Net as a stage graph",
            "What was declared: stages by device, values with their bytes, skips dashed. No time is shown, only who "
            "reads what from whom.",
            "to check a declaration and a placement.",
            lambda: draw(unet_plan(), graph="stages", pipeline=unet()),
        ),
        *(schedule_entry(name) for name in SCHEDULES),
        Entry(
            "pipemare-segments",
            "PipeMare's recompute by segments",
            "pipec.PipeMare(segments=3) on six devices: two segments, of which only the first devices keep inputs. The "
            " yellow tasks of a segment follow each other, each just before its backward.",
            "when activations of many stages do not fit.",
            lambda: draw(asynchronous_plan(pipec.PipeMare(segments=3), 6), copies=True),
        ),
        Entry(
            "compare",
            "All schedules on one axis",
            "The same model, costs and number of microbatches under every synchronous schedule. The black line is the "
            "end of each step; `pipec compare` draws this for your own model.",
            "to choose a schedule.",
            lambda: draw([schedule_plan(name) for name in REGISTRY], titles=list(REGISTRY)),
        ),
        Entry(
            "recompute",
            "Recompute",
            '1f1b with recompute="except_last": a forward keeps only its inputs, and the yellow task rebuilds the rest '
            "right before the backward. The memory strips show what that saves, the title what it costs.",
            "when activations do not fit.",
            lambda: draw(schedule_plan("1f1b", recompute="except_last")),
        ),
        Entry(
            "bandwidth",
            "Copies that take time",
            "Links of limited bandwidth: each device has a lane for what it sends and one for what it receives. Bytes "
            "are known here, so memory is in bytes, against a limit.",
            "to see whether the links, and not the devices, decide the step time.",
            lambda: draw(
                unet_plan(4), costs=unet_costs(latency=0.1, bandwidth=8.0 * MIB), lanes=True, memory_limit=128 * MIB
            ),
        ),
        Entry(
            "lanes",
            "The lanes of a skip edge",
            "Three stages on three devices, the first one's value read by the last as well. Below each device are its "
            "copy-out and copy-in lanes: the skip goes straight to its reader, beside the work of the device between.",
            "to see what waits for what on GPUs, where lanes are streams.",
            lambda: draw(skip_plan(), costs=skip_costs(), lanes=True, copies=True),
        ),
        Entry(
            "tasks",
            "The task graph of a small plan",
            "Every forward and backward of three microbatches and what it needs; black arrows cross devices. Columns "
            "are steps, so every arrow points to the right.",
            "to understand why a task waits.",
            lambda: draw(pipec.compile(pipec.chain(4), 2, 3), graph="tasks"),
        ),
    ]


def files(entry: Entry) -> list[str]:
    return [f"{entry.name}.svg", *([f"{entry.name}.png"] if entry.png else [])]


def digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def index(made: list[Entry]) -> str:
    """The text of this folder's README.md."""
    rows = [
        "# Pictures",
        "",
        "Each row of a timeline is a device, each box a task with its microbatch's number; grey is the bubble, red the",
        "critical path: the chain of tasks that decides the step time. Below, on the same axis, is what each device",
        "keeps in memory. Open an SVG by itself and rest the pointer on a box to read which stage it is, when it runs",
        "and what it waited for.",
        "",
        f"The schedules are drawn for {DEVICES} devices, {MICROBATCHES} microbatches, equal work, and free hand-overs. "
        "A whole backward takes",
        "twice as long as a forward. A device's forward of one microbatch takes two units of time: one box, or where a",
        "device has two chunks a light box of the first and a dark one of the second.",
        "",
        "`python viz/make.py` draws all of this again.",
        "",
    ]
    for entry in made:
        rows += [
            f"## {entry.heading}",
            "",
            f"![{entry.heading}]({entry.name}.svg)",
            "",
            entry.text,
            "",
            f"Use it {entry.use}",
            "",
        ]
    return "\n".join(rows).rstrip() + "\n"


def stale(made: list[Entry], pictures: dict[str, Picture]) -> list[str]:
    """Files that are missing, changed by hand, or painted from other DOT text than today's."""
    kept = json.loads(FRESH.read_text(encoding="utf-8")) if FRESH.is_file() else {}
    wrong = []
    for entry in made:
        for name in files(entry):
            path = HERE / name
            now = {"dot": digest(pictures[entry.name].dot), "file": digest(path.read_bytes()) if path.is_file() else ""}
            if kept.get(name) != now:
                wrong.append(name)
    known = {name for entry in made for name in files(entry)}
    wrong += sorted(p.name for p in HERE.iterdir() if p.suffix in (".svg", ".png") and p.name not in known)
    readme = HERE / "README.md"
    if not readme.is_file() or readme.read_text(encoding="utf-8") != index(made):
        wrong.append("README.md")
    return wrong


def main(arguments: list[str]) -> int:
    made = entries()
    pictures = {entry.name: entry.make() for entry in made}
    wrong = stale(made, pictures)
    if "--check" in arguments:
        print("\n".join(f"not up to date: {name}" for name in wrong) or "the gallery is up to date")
        return 1 if wrong else 0
    known = {name: entry for entry in made for name in files(entry)}
    for name in wrong:
        if name in known:
            pictures[known[name].name].save(HERE / name)
            print(f"drew {name}")
        elif name != "README.md":
            (HERE / name).unlink()
            print(f"removed {name}")
    fresh = {
        name: {"dot": digest(pictures[entry.name].dot), "file": digest((HERE / name).read_bytes())}
        for name, entry in known.items()
    }
    FRESH.write_text(json.dumps(fresh, indent=2) + "\n", encoding="utf-8")
    (HERE / "README.md").write_text(index(made), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
