"""Cut Segment Anything to a device: verify its labels, extract a submodel, prompt it with a point, export its encoder.

python examples/segment_anything/sam.py                                  # a tiny random one; seconds
python examples/segment_anything/sam.py --model facebook/sam-vit-base    # real weights: a folder, or a name on the hub
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import SamModel

from raffm import RaFFM, save_submodel, verify
from raffm.export.write import write_onnx
from raffm.models.load import tiny


def main() -> None:
    """From a model to a file for the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a folder or a name on the hub; without, a tiny random model")
    parser.add_argument("--size", type=float, default=0.6, help="the part of the parameters that the device holds")
    parser.add_argument("--out", type=Path, default=Path("runs/sam"))
    options = parser.parse_args()
    console = Console()
    model: Any = SamModel.from_pretrained(options.model).eval() if options.model else random_one()

    found = verify(model)
    console.print(f"labels: {len(found.rows)} kinds of groups were permuted and cut: {'right' if found.holds else 'WRONG'}")

    elastic = RaFFM(model)
    elastic.salient_parameter_prioritization()
    module, params, _ = elastic.fit(max_params=int(options.size * elastic.total_params))
    small: Any = module
    console.print(f"submodel: {params:,} of {elastic.total_params:,} parameters, the most salient ones")

    picture, point = drawn(model.config.vision_config.image_size)
    whole, cut = (prompted(each, picture, point) for each in (model, small))
    overlap = float((whole & cut).sum() / (whole | cut).sum().clamp(min=1))
    console.print(
        f"prompt: a point on a square; masks of {tuple(cut.shape)} pixels, of which the two models share {overlap:.0%}"
    )

    save_submodel(small, options.out / "submodel")
    encoder = small.vision_encoder
    written = write_onnx(encoder, {"pixel_values": torch.cat([picture, picture.flip(-1)])}, options.out / "encoder.onnx")
    console.print(f"encoder: {written.path}, {written.bytes / 1e6:.1f} MB; ONNX Runtime is {written.gap:.0e} from torch")


def random_one() -> SamModel:
    """A tiny model whose random weights say something; the library's own are nearly 0."""
    model: Any = tiny("sam")
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model  # type: ignore[no-any-return]


def drawn(side: int) -> tuple[Tensor, Tensor]:
    """A bright square on a dark ground, and a point on it."""
    picture = torch.full((1, 3, side, side), -1.0)
    picture[..., side // 4 : side // 2, side // 4 : side // 2] = 1.0
    return picture, torch.full((1, 1, 1, 2), 3 * side / 8)


@torch.no_grad()
def prompted(model: Any, picture: Tensor, point: Tensor) -> Tensor:
    """The mask that a model finds at a point."""
    output = model(pixel_values=picture, input_points=point, multimask_output=False)
    mask: Tensor = output.pred_masks[0, 0, 0] > 0
    return mask


if __name__ == "__main__":
    main()
