from typing import Annotated, Any

from torch import Tensor

from flexmasks.orders import coordinates
from flexmasks.spec import Size, check_canvas, describe, register_score


def _prepare(
    size: Size | None,
    *,
    table: Annotated[Tensor, "float[H, R, C]"],
    height: Annotated[int, "int in 1.."],
    width: Annotated[int, "int in 1.."],
) -> dict[str, Any]:
    check_canvas(size, {"height": height, "width": width})
    if table.shape[1:] != (2 * height - 1, 2 * width - 1):
        raise ValueError(
            f"`table` must be [query heads, 2 * height - 1, 2 * width - 1], here [{table.shape[0]}, {2 * height - 1}, "
            f"{2 * width - 1}], got {describe(table)}."
        )
    return {"table": table, "height": height, "width": width}


def _example(length: int) -> dict[str, Any]:
    height, width = 16, length // 16
    far = [abs(row) / height for row in range(1 - height, height)]
    table = [[-2 * row - abs(column) / width for column in range(1 - width, width)] for row in far]
    return {"table": [table], "height": height, "width": width}


@register_score(prepare=_prepare, example=_example)
def relative_bias_2d(
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, table: Tensor, height: int, width: int
) -> Tensor:
    """Scores plus a learned bias of the distance in rows and in columns.

    table: [query heads, 2 * height - 1, 2 * width - 1]; the entry of a pair is table[h, row of q - row of kv +
        height - 1, column of q - column of kv + width - 1]. A tensor that requires a gradient gets one.
    height, width: the image, or the window of one; token t is in row t // width and column t % width, and there are
        height * width keys.

    Distances are those of Swin, of the query minus the key; those of `relative_bias` are of the key minus the query.

    Source: Liu et al., Swin Transformer, 2021 (arXiv 2103.14030).
    Peers: the relative_position_bias_table of torchvision's, timm's and Hugging Face's Swin, which is
        [(2 * height - 1) * (2 * width - 1), heads]: table=t.T.reshape(-1, 2 * height - 1, 2 * width - 1).
    """
    canvas = height, width
    rows, columns = (i - j for i, j in zip(coordinates(q, canvas), coordinates(kv, canvas), strict=True))
    return score + table[h, rows + (height - 1), columns + (width - 1)]
