"""Denoise photographs with a U-Net whose long skips cross from one device to the other.

    python examples/unet.py                        about a minute
    python examples/unet.py --recompute always     less memory, more work
    python examples/unet.py --quick                a few seconds

Data: patches of the two photographs that ship inside scikit-learn, with Gaussian noise added. Two devices: the GPUs
there are, or two cores. Pictures go to out/.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from helpers import gpus, interleaved, progress
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

import pipec

SIGMA, BATCH, MICROBATCHES, RATE = 0.2, 16, 8, 3e-3


def convolution(channels: int, out: int, size: int = 3) -> nn.Conv2d:
    layer = nn.Conv2d(channels, out, size, padding=size // 2)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
    return layer


def convolutions(channels: int, out: int) -> nn.Module:
    return nn.Sequential(convolution(channels, out), nn.LeakyReLU(0.1), convolution(out, out), nn.LeakyReLU(0.1))


class Up(nn.Module):
    """Double the image, append the encoder's, then two convolutions."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.narrow, self.body = convolution(channels, out, 1), convolutions(2 * out, out)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.body(torch.cat([F.interpolate(self.narrow(x), scale_factor=2), skip], 1))


class Denoise(nn.Module):
    """Take the noise found off the noisy image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.noise = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x: Tensor, noisy: Tensor) -> Tensor:
        return noisy - self.noise(x)


def down(channels: int, out: int) -> nn.Module:
    return nn.Sequential(nn.MaxPool2d(2), convolutions(channels, out))


def build(c: int) -> pipec.Pipeline:
    """Stages, their edges, and three skips from the encoder to the decoder."""
    torch.manual_seed(0)
    net = pipec.Pipeline("U-Net")
    noisy, clean = net.input("noisy"), net.input("clean")
    enc1 = net.stage("enc1", convolutions(3, c), noisy)
    enc2 = net.stage("enc2", down(c, 2 * c), enc1)
    enc3 = net.stage("enc3", down(2 * c, 4 * c), enc2)
    middle = net.stage("middle", down(4 * c, 8 * c), enc3)
    dec3 = net.stage("dec3", Up(8 * c, 4 * c), middle, pipec.skip(enc3))
    dec2 = net.stage("dec2", Up(4 * c, 2 * c), dec3, pipec.skip(enc2))
    dec1 = net.stage("dec1", Up(2 * c, c), dec2, pipec.skip(enc1))
    image = net.stage("denoise", Denoise(c), dec1, noisy)
    net.output(image)
    net.loss("mse", F.mse_loss, image, clean)
    return net


def photographs() -> tuple[Tensor, Tensor]:
    """Both photographs as (2, 3, rows, columns) in 0..1: the upper part for training, the lower for testing."""
    images = torch.stack([torch.from_numpy(image.copy()) for image in load_sample_images().images])
    images = images.permute(0, 3, 1, 2).float() / 255
    return images[..., :320, :], images[..., 320:, :]


def patches(images: Tensor, count: int, size: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy and clean patches from random places."""
    which = torch.randint(len(images), (count,), generator=draw).tolist()
    rows = torch.randint(images.shape[2] - size + 1, (count,), generator=draw).tolist()
    columns = torch.randint(images.shape[3] - size + 1, (count,), generator=draw).tolist()
    clean = torch.stack(
        [images[i, :, r : r + size, k : k + size] for i, r, k in zip(which, rows, columns, strict=True)]
    )
    return clean + SIGMA * torch.randn(clean.shape, generator=draw), clean


def psnr(image: Tensor, clean: Tensor) -> float:
    return float(-10 * torch.log10(F.mse_loss(image.clamp(0, 1), clean)))


def main(argv: list[str] | None = None) -> dict[str, float]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a small net and a few steps")
    options.add_argument("--recompute", default="never", choices=["never", "always", "except_last"])
    options.add_argument("--out", type=Path, default=Path("out"), help="folder of the pictures")
    chosen = options.parse_args(argv)
    width, size, steps, rounds = (8, 24, 60, 3) if chosen.quick else (16, 48, 200, 9)
    torch.set_num_threads(1)  # a device is one core: two of them do not fight over the same ones
    draw = torch.Generator().manual_seed(1)
    train, test = photographs()
    noisy, clean = patches(train, BATCH, size, draw)

    # 1. Compile: profile the stages, balance them over the devices, order the tasks.
    net = build(width)
    costs = pipec.profile(net, microbatches=MICROBATCHES, noisy=noisy, clean=clean)
    plan = pipec.compile(net, 2, MICROBATCHES, "1f1b", recompute=chosen.recompute, costs=costs)
    predicted = plan.simulate()
    head = str(plan).split("\ndevice 0\n")[0].replace("\n", "\n  ")
    print(f"The plan (print(plan) shows every copy, wait and lifetime, too):\n  {head}")
    for device, tasks in enumerate(plan.tasks):
        shown = " ".join(str(task) for task in tasks if task.kind is not pipec.Kind.COPY)
        print(f"  device {device}: {shown[:95]} ...")
    print()
    print(f"Predicted from a profile of each stage:\n{predicted}\n")

    # 2. The same numbers as without a pipeline.
    report = pipec.check(net, {"noisy": noisy, "clean": clean}, plan)
    print(f"One step checked against the plain loop. {report}\n")

    # 3. How fast: two devices against one, in turns. The gradients of these steps are thrown away.
    single = pipec.compile(net, 1, MICROBATCHES)
    devices = gpus(2)
    with (
        pipec.Runner(net, plan, devices, backend="cuda" if devices else "threads") as two,
        pipec.Runner(build(width), single, gpus(1)) as one,
    ):
        took, cores = interleaved(
            {"two": lambda: float(two.step(noisy, clean).loss), "one": lambda: float(one.step(noisy, clean).loss)},
            rounds,
        )
        measured = two.trace()
    error = took["two"] / predicted.makespan - 1
    print(f"Step time: predicted {predicted.makespan:.0f} ms, measured {took['two']:.0f} ms ({error:+.0%})")
    print(f"One device: {took['one']:.0f} ms, {took['one'] / took['two']:.2f} times as long")
    if devices:
        print(f"(Measured on {', '.join(dict.fromkeys(devices))}; the prediction is from a profile on the CPU.)")
    elif cores["two"] < 0.85 * sum(predicted.busy):
        print(f"(This machine has other work: the two devices got {cores['two']:.1f} cores, the plan keeps "
              f"{sum(predicted.busy):.1f} busy. Run it again when the machine is idle.)")
    print()

    # 4. Pictures.
    chosen.out.mkdir(exist_ok=True)
    titles = ["predicted", "measured"]
    # Without width= the axis grows with the number of tasks; 1050 points and the margins are about 1600 pixels.
    pipec.draw([predicted, measured], chosen.out / "unet.svg", titles=titles, width=1050)
    pipec.draw(plan, chosen.out / "unet-stages.svg", graph="stages", pipeline=net)
    print(f"Pictures: {chosen.out / 'unet.svg'} (predicted and measured), {chosen.out / 'unet-stages.svg'}\n")

    # 5. Train: your own loop and your own optimizer.
    optimizer = torch.optim.Adam([p for s in net.spec.stages for p in s.fn.parameters()], lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    losses: list[float] = []
    test_noisy, test_clean = patches(test, 64, size, draw)
    with pipec.Runner(net, plan, devices) as run:
        print("Training:", flush=True)
        for _ in progress(steps, lambda: f"loss {losses[-1]:.5f}"):
            optimizer.zero_grad()
            noisy, clean = patches(train, BATCH, size, draw)
            losses.append(float(run.step(noisy=noisy, clean=clean).loss))
            optimizer.step()
            schedule.step()
        restored = run.evaluate(noisy=test_noisy).output.cpu()
    before, after = psnr(test_noisy, test_clean), psnr(restored, test_clean)
    print(f"Patches never seen in training: PSNR {before:.1f} dB with noise, {after:.1f} dB restored")
    save_patches(chosen.out / "unet-patches.png", test_noisy, restored, test_clean)
    return {"exact": bool(report), "first": losses[0], "last": losses[-1], "before": before, "after": after, **took,
            "predicted": predicted.makespan}


def save_patches(path: Path, noisy: Tensor, restored: Tensor, clean: Tensor) -> None:
    """The eight patches with most contrast (much of the photographs is dark), one kind a row."""
    from PIL import Image

    shown = clean.flatten(1).std(1).topk(8).indices
    grid = torch.cat([torch.cat(list(kind[shown].clamp(0, 1)), 2) for kind in (noisy, restored, clean)], 1)
    pixels = (grid.permute(1, 2, 0) * 255).byte().numpy()
    Image.fromarray(pixels).resize((2 * pixels.shape[1], 2 * pixels.shape[0])).save(path)
    print(f"Noisy, restored, original: {path}")


if __name__ == "__main__":
    main()
