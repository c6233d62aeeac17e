"""Vision cross-attention: text sees the images that belong to its place.

In a text with images between the words (Flamingo), queries are tokens of text and keys are the tokens of all images.
Each image i has an interval of text positions: token q sees every token of image i if start_i <= q < end_i. In
Flamingo the interval of an image ends where the next one begins. Here intervals may overlap, or leave a token without
an image: its output is then 0, where SDPA gives NaN.
"""

# %%
from __future__ import annotations

import torch

import flexmasks
from _measure import (
    CHECKED_SHAPE,
    DEVICE,
    ON_GPU,
    TIMED_SHAPE,
    check_attention,
    finish,
    mask_rows,
    pair_by_pair,
    random_qkv,
    start,
    textbook,
)


# %% The reference is the definition in plain Python.
def sees(q: int, kv: int, intervals: list[list[int]], image_ids: list[int]) -> bool:
    """Return whether text token q sees image token kv; -1 marks padding between images."""
    if image_ids[kv] < 0:
        return False
    start, end = intervals[image_ids[kv]]
    return start <= q < end


# %% An example that is small enough to read: three images of three tokens, 12 tokens of text. The first image belongs
# to all tokens before 7, the second to the same ones but the first, and the third to the others.
INTERVALS = [(0, 7), (1, 7), (7, 12)]
IMAGE_IDS = [0, 0, 0, 1, 1, 1, 2, 2, 2]
PICTURE = """
███······
██████···
██████···
██████···
██████···
██████···
██████···
······███
······███
······███
······███
······███
"""


def check_the_picture() -> None:
    """Draw the example, check its picture letter by letter, and its attention against the picture."""
    intervals, image_ids = (torch.tensor(numbers, device=DEVICE) for numbers in (INTERVALS, IMAGE_IDS))
    mask = flexmasks.get_mask("vision_cross", intervals=intervals, image_ids=image_ids)
    flexmasks.show(mask, len(PICTURE.split()), len(IMAGE_IDS))
    seen = torch.tensor([[letter == "█" for letter in line] for line in PICTURE.split()], device=DEVICE)
    drawn = flexmasks.dense_mask(mask, *seen.shape, device=DEVICE)[0, 0]
    assert torch.equal(drawn, seen), "the mask is not the picture"
    check_attention(
        "3 images of 3 tokens, 12 tokens of text",
        lambda q, k, v: flexmasks.attention(q, k, v, mask=mask),
        lambda q, k, v: textbook(q, k, v, seen),
        shape=(1, 2, 12, 16),
        keys=len(IMAGE_IDS),
    )


# %% Draw, check and time.
def main() -> None:
    """Draw, check and time the mask."""
    file = start(__doc__)
    check_the_picture()

    text = CHECKED_SHAPE[2]
    intervals = [[100, 400], [400, 700], [650, 900], [900, text]]  # the first 100 tokens see no image, 50 see two
    image_ids = [0] * 150 + [1] * 150 + [2] * 150 + [3] * 150 + [-1] * 40
    seen = pair_by_pair(lambda q, kv: sees(q, kv, intervals, image_ids), text, len(image_ids))
    assert not bool(seen[:100].any())
    check_attention(
        f"4 images of 150 tokens, {text} tokens of text",
        lambda q, k, v: flexmasks.attention(q, k, v, mask="vision_cross", intervals=intervals, image_ids=image_ids),
        lambda q, k, v: textbook(q, k, v, seen),
        keys=len(image_ids),
    )

    images, tokens = (16, 576) if ON_GPU else (4, 160)
    starts = [TIMED_SHAPE[2] * i // images for i in range(images)]  # each image up to the next
    mask = flexmasks.get_mask(
        "vision_cross",
        intervals=torch.tensor([*zip(starts, [*starts[1:], TIMED_SHAPE[2]], strict=True)], device=DEVICE),
        image_ids=torch.arange(images, device=DEVICE).repeat_interleave(tokens),
    )
    print(f"\n{images} images of {tokens} tokens, {TIMED_SHAPE[2]} tokens of text:")
    print(f"{mask.blocks(TIMED_SHAPE[2], images * tokens)}\n")
    q, k, v = random_qkv(keys=images * tokens)
    finish(mask_rows("vision cross", mask, q, k, v), file, "TFLOP/s count the pairs that the mask shows.")


if __name__ == "__main__":
    main()
