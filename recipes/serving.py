"""Serving: attention to a cache with room and to a paged one, and a loop that answers many requests.

While text is generated, the keys and values of earlier tokens lie in a cache. Decoding is attention of the last query,
and reading a prompt in chunks is attention of the next few queries. Both are causal attention whose first query is not
at position 0 but at the end of its sequence. `q_offset` says where, for each batch element. Keys past a query's
position are hidden, so it does not matter what a cache with room holds behind its last token.

A cache with room for the longest sequence wastes the room that shorter sequences leave. A paged cache cuts the memory
into pages that any sequence may hold, and a table lists the pages of each sequence. `paged_attention` takes the cache
and the table in the layouts of vLLM and FlashAttention.

The loop serves requests by continuous batching: a small language model decodes one token for each running sequence at
a step, and when a sequence ends, its pages and its place in the batch go to the next request. Lengths, page table and
pages are tensors that change in place. On a GPU the step is captured in a CUDA graph once and replayed.
"""

# %%
from __future__ import annotations

import functools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flexmasks
from _measure import DEVICE, DTYPE, ON_GPU, Row, check, finish, start, textbook
from flexmasks.bench.clock import interleaved, progress, synchronize

# batch, heads, key heads, room, head size
CHECKED_SHAPE = (3, 4, 2, 512, 64)
TIMED_SHAPE = (64, 32, 8, 8192, 128) if ON_GPU else CHECKED_SHAPE


# %% A cache with room, [B, Hkv, room, D]. The next queries of each sequence stand where its keys end.
def attend(q: Tensor, k: Tensor, v: Tensor, lens: Tensor) -> Tensor:
    """Attend from the last queries q [B, H, Q, D] of each sequence.

    Sequence b has lens[b] keys, which include the keys at the positions of q.
    """
    out: Tensor = flexmasks.attention(q, k, v, mask="causal", q_offset=lens - q.shape[2])
    return out


# %% The same cache in pages of one pool, [pages, page size, Hkv, D], with a table of the pages of each sequence.
class Pages:
    """A cache [B, Hkv, room, D] cut into pages that lie in any order."""

    def __init__(self, k: Tensor, v: Tensor, page_size: int) -> None:
        batch, _, room, _ = k.shape
        order = torch.randperm(batch * room // page_size, device=DEVICE)
        self.table = order.view(batch, -1).int()
        self.k, self.v = (self.pool(x, page_size) for x in (k, v))

    def pool(self, x: Tensor, page_size: int) -> Tensor:
        """Return all pages, [pages, page size, Hkv, D], in the order that the table gives."""
        pages = x.transpose(1, 2).unflatten(1, (-1, page_size)).flatten(0, 1)
        return torch.empty_like(pages).index_copy_(0, self.table.flatten().long(), pages)

    def attend(self, q: Tensor, lens: Tensor) -> Tensor:
        """Attend to the pages, as `attend` above does to a cache with room."""
        out: Tensor = flexmasks.paged_attention(q, self.k, self.v, self.table, lens, mask="causal")
        return out


# %% The reference takes each sequence by itself, with its own keys only, in float64.
def one_by_one(q: Tensor, k: Tensor, v: Tensor, lens: Tensor) -> Tensor:
    """Attend as `attend` above does, one sequence after the other."""
    outs = []
    for b, length in enumerate(lens.tolist()):
        own_k, own_v = (x[b, :, :length].repeat_interleave(q.shape[1] // x.shape[1], 0).double() for x in (k, v))
        seen = torch.ones(q.shape[2], length, dtype=torch.bool, device=DEVICE).tril(length - q.shape[2])
        outs.append(textbook(q[b].double(), own_k, own_v, seen))
    return torch.stack(outs)


def check_caches() -> None:
    """Decode some tokens and read prompts in chunks, from both caches."""
    (batch, heads, kv_heads, room, size), page_size, chunk = CHECKED_SHAPE, 64, 128
    q = torch.randn(batch, heads, room, size, device=DEVICE)
    k, v = torch.randn(2, batch, kv_heads, room, size, device=DEVICE)
    first = q[:, :, :1]
    for what, call in caches(k, v, page_size).items():
        lens = torch.tensor([300, 17, 511], device=DEVICE)
        for _ in range(2):  # at each step every sequence is one token longer
            check(f"{what}, decoding at lengths {lens.tolist()}", call(first, lens), one_by_one(first, k, v, lens))
            lens += 1
    if not ON_GPU:
        q, k, v = q.double(), k.double(), v.double()  # float64 compiles nothing, which would take long on a CPU
    whole = one_by_one(q, k, v, torch.full((batch,), room))
    for what, call in caches(k, v, page_size).items():
        ends = range(chunk, room + 1, chunk)
        parts = [call(q[:, :, n - chunk : n], torch.full((batch,), n, device=DEVICE)) for n in ends]
        check(f"{what}, a prompt of {room} tokens in chunks of {chunk}", torch.cat(parts, 2), whole)


def caches(k: Tensor, v: Tensor, page_size: int) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Return attention to each of the two caches, as a function of queries and lengths."""
    return {
        "a cache with room": lambda q, lens: attend(q, k, v, lens),
        "a cache in pages": Pages(k, v, page_size).attend,
    }


# %% Time attention of one step of decoding, which must read the keys and values of each sequence once.
def time_caches() -> list[Row]:
    """Return the times of attention to both caches, and of SDPA with a mask."""
    batch, heads, kv_heads, room, size = TIMED_SHAPE
    q = torch.randn(batch, heads, 1, size, device=DEVICE, dtype=DTYPE)
    k, v = torch.randn(2, batch, kv_heads, room, size, device=DEVICE, dtype=DTYPE)
    lens = torch.randint(1, room + 1, (batch,), device=DEVICE)
    offset = lens - 1
    seen = (torch.arange(room, device=DEVICE) < lens[:, None])[:, None, None]
    calls: dict[str, Callable[[], Tensor]] = {
        "with room": lambda: flexmasks.attention(q, k, v, mask="causal", q_offset=offset),
        "with room: SDPA + mask": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True),
    }
    for page_size in (256, 128, 16) if ON_GPU else (64,):
        made = Pages(k, v, page_size)
        calls[f"pages of {page_size}"] = lambda made=made: made.attend(q, lens)  # type: ignore[misc]
    progress("preparing")
    outputs = {who: call() for who, call in calls.items()}
    progress("timing")
    times = interleaved(calls, DEVICE, 5)
    progress("")
    for who, out in outputs.items():
        check(f"{who}: agrees, at the size that is timed", out, outputs["with room"])
    used = float(lens.sum()) / (batch * room)
    read = 2 * int(lens.sum()) * kv_heads * size * k.element_size()
    print(f"{batch} sequences of up to {room} keys, {used:.0%} of the room in use, {read / 1e6:.0f} MB to be read")
    return [
        {"a step of decoding": who, "ms": float(f"{ms:.4g}"), "GB/s": float(f"{read / ms / 1e6:.4g}")}
        for who, (ms, *_) in times.items()
    ]


# %% The model of the loop: a transformer with grouped heads and rotary positions, its weights from a seed. The ways to
# run it differ in the attention of its layers. Attention takes the number of a layer and the q, k and v of new tokens,
# and it knows where the keys and values of earlier tokens are.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Sizes(NamedTuple):
    """Sizes of a model and of the loop that serves it; lengths count tokens."""

    vocabulary: int
    width: int
    heads: int
    kv_heads: int
    layers: int
    requests: int
    prompt: int  # the longest prompt
    answer: int  # the longest answer
    slots: int  # the most sequences that run at the same time
    chunk: int  # tokens of a prompt that one call reads
    page_size: int
    pages: int  # of the pool, page 0 included

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def pages_each(self) -> int:
        """Return the number of pages of the longest sequence."""
        return -(-(self.prompt + self.answer) // self.page_size)


# The pools are smaller than slots x pages_each: few sequences are as long as the longest.
CHECKED = Sizes(96, 256, 4, 2, 2, requests=24, prompt=100, answer=30, slots=8, chunk=16, page_size=16, pages=42)
TIMED = (
    Sizes(512, 2048, 16, 4, 8, requests=192, prompt=3072, answer=512, slots=64, chunk=512, page_size=128, pages=1201)
    if ON_GPU
    else CHECKED
)
END = 7  # the token that ends an answer before its length does


class Layer(nn.Module):
    """Attention and a feed-forward network, each with a residual connection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.parts = [sizes.heads, sizes.kv_heads, sizes.kv_heads]
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, sum(self.parts) * sizes.head_size), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (sum(self.parts), -1)).transpose(1, 2)
        q, k, v = heads.split(self.parts, 1)
        x = x + self.out(attend(rotated(q, cos, sin), rotated(k, cos, sin), v).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))  # type: ignore[no-any-return]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of elements by the angles of their positions.

    x: [B, H, Q, D]; cos, sin: [B, 1, Q, D/2].
    """
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Model(nn.Module):
    """A transformer from tokens to the scores of the tokens that follow them.

    tokens, positions: integers [B, Q]; the scores are [B, Q, vocabulary].
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.word = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.last, self.scores = nn.RMSNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary)
        pairs = torch.arange(sizes.head_size // 2, device=DEVICE, dtype=torch.float64)
        self.speeds = 10000 ** (-pairs / len(pairs))  # the angle of a pair of elements from one position to the next

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.word(tokens)
        angles = positions[:, None, :, None] * self.speeds
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for number, layer in enumerate(self.layers):
            x = layer(x, cos, sin, functools.partial(attend, number))
        return self.scores(self.last(x))  # type: ignore[no-any-return]


def make_model(sizes: Sizes, dtype: torch.dtype) -> Model:
    """Make a model; the same sizes give the same weights on every device.

    The weights of attention are larger than usual. Each token then depends on many earlier tokens, so that a wrong key
    would change the text.
    """
    torch.manual_seed(0)
    model = Model(sizes)
    for name, weight in model.named_parameters():
        if name.endswith(("qkv.weight", "out.weight")):
            weight.mul_(4)
    return model.to(DEVICE, dtype)


# %% A cache of the loop gives memory to the sequence in a slot of the batch, takes it back, and attends. The new tokens
# of a call stand at `positions` [B, Q], the first of them at `starts` [B]; `lens` [B] are the lengths of the sequences
# with these tokens. Tokens from a length on belong to no sequence: idle slots have a length of 0, and the last chunk of
# a prompt is padded. Their keys and values go to a place that no sequence looks at.
class PagedCache:
    """Keys and values of all layers in one pool of pages.

    Page 0 belongs to no sequence. A sequence gets all its pages when it starts, so it never waits for one later.
    """

    def __init__(self, sizes: Sizes, dtype: torch.dtype) -> None:
        shape = (sizes.layers, sizes.pages, sizes.page_size, sizes.kv_heads, sizes.head_size)
        self.k, self.v = (torch.zeros(shape, device=DEVICE, dtype=dtype) for _ in range(2))
        self.table = torch.zeros(sizes.slots, sizes.pages_each, device=DEVICE, dtype=torch.int32)
        self.free = list(range(1, sizes.pages))
        self.held: dict[int, list[int]] = {}

    def take(self, slot: int, length: int) -> bool:
        """Give a slot the pages for a sequence; return False if too few are free."""
        count = -(-length // self.k.shape[2])
        if count > len(self.free):
            return False
        self.held[slot] = [self.free.pop() for _ in range(count)]
        self.table[slot, :count] = torch.tensor(self.held[slot])
        return True

    def give_back(self, slot: int) -> None:
        """Take back the pages of a sequence that ended."""
        self.free += self.held.pop(slot)

    def attention(self, slots: slice, starts: Tensor, positions: Tensor, lens: Tensor) -> Attend:
        """Return attention of some slots, which first stores new keys and values."""
        table, page_size = self.table[slots], self.k.shape[2]
        pages = table.gather(1, (positions // page_size).clamp(max=table.shape[1] - 1))
        places = torch.where(positions < lens[:, None], pages * page_size + positions % page_size, 0).flatten()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for pool, x in ((self.k[layer], k), (self.v[layer], v)):
                pool.flatten(0, 1)[places] = x.transpose(1, 2).flatten(0, 1)
            return flexmasks.paged_attention(
                q, self.k[layer], self.v[layer], table, lens, mask="causal", q_offset=starts
            )

        return attend


class RoomCache:
    """The same without flexmasks: SDPA, with a mask as a tensor.

    Each slot has room for the longest sequence, and a last place that belongs to no sequence.
    """

    def __init__(self, sizes: Sizes, dtype: torch.dtype) -> None:
        room = (sizes.pages_each + 1) * sizes.page_size
        shape = (sizes.layers, sizes.slots, sizes.kv_heads, room, sizes.head_size)
        self.k, self.v = (torch.zeros(shape, device=DEVICE, dtype=dtype) for _ in range(2))

    def take(self, slot: int, length: int) -> bool:
        """Return True: every slot has room."""
        return True

    def give_back(self, slot: int) -> None:
        """Do nothing: keys past the length of a sequence are hidden."""

    def attention(self, slots: slice, starts: Tensor, positions: Tensor, lens: Tensor) -> Attend:
        """Return attention as PagedCache does."""
        room, slot = self.k.shape[3], torch.arange(len(lens), device=DEVICE)[:, None]
        seen = (torch.arange(room, device=DEVICE) <= positions[..., None])[:, None]
        places = torch.where(positions < lens[:, None], positions, room - 1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            all_k, all_v = self.k[layer, slots], self.v[layer, slots]
            all_k[slot, :, places], all_v[slot, :, places] = k.transpose(1, 2), v.transpose(1, 2)
            return F.scaled_dot_product_attention(q, all_k, all_v, attn_mask=seen, enable_gqa=True)

        return attend


# %% A server reads prompts in chunks, and decodes one token for all running sequences at once.
class Server:
    """A model, a cache, and the last token and length of each sequence.

    The length is that of the sequence in the cache, and 0 for a slot that is idle or still reads its prompt.
    """

    def __init__(self, model: Model, cache: PagedCache | RoomCache, in_graph: bool = False) -> None:
        self.model, self.cache = model, cache
        self.tokens = torch.zeros(model.sizes.slots, 1, device=DEVICE, dtype=torch.int64)
        self.lens = torch.zeros(model.sizes.slots, device=DEVICE, dtype=torch.int32)
        self.step = captured(self.decode) if in_graph else self.decode

    def decode(self) -> None:
        """Replace the last token of each sequence by the token that follows it."""
        starts = self.lens.clone()
        self.lens += starts > 0
        self.tokens.copy_(self.scores(slice(None), self.tokens, starts, self.lens).argmax(-1))

    def read(self, slot: int, prompt: list[int], start: int) -> Tensor:
        """Read a chunk of a prompt, and return the token that follows it."""
        chunk = prompt[start : start + self.model.sizes.chunk]
        padded = chunk + [0] * (self.model.sizes.chunk - len(chunk))
        tokens, starts, lens = (torch.tensor([x], device=DEVICE) for x in (padded, start, start + len(chunk)))
        scores = self.scores(slice(slot, slot + 1), tokens, starts, lens)
        return scores[0, len(chunk) - 1].argmax()

    def scores(self, slots: slice, tokens: Tensor, starts: Tensor, lens: Tensor) -> Tensor:
        """Return the scores of what follows tokens [B, Q] of some slots."""
        positions = starts[:, None] + torch.arange(tokens.shape[1], device=DEVICE)
        scores: Tensor = self.model(tokens, positions, self.cache.attention(slots, starts, positions, lens))
        return scores


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return the replay of a step on a GPU, captured in a CUDA graph.

    The steps that come before the capture, as CUDA wants it, change nothing while all slots are idle.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


# %% Continuous batching: each turn fills the free slots, reads a chunk of each new prompt, and decodes a token.
class Request(NamedTuple):
    """A prompt, and the greatest length of its answer."""

    prompt: list[int]
    answer: int


class Served(NamedTuple):
    """The answers to all requests, and what happened in the loop."""

    answers: list[list[int]]
    seconds: float
    steps: list[float]  # seconds of each step of decoding
    most_running: int
    waits: int  # turns in which a slot was free, and too few pages for the next request


def make_requests(sizes: Sizes) -> list[Request]:
    """Draw requests of random lengths."""
    generator = torch.Generator().manual_seed(2)  # the best two scores of a token then are never close

    def draw(least: int, most: int, count: int) -> list[int]:
        return torch.randint(least, most + 1, (count,), generator=generator).tolist()

    prompts, answers = draw(1, sizes.prompt, sizes.requests), draw(1, sizes.answer, sizes.requests)
    return [Request(draw(0, sizes.vocabulary - 1, n), m) for n, m in zip(prompts, answers, strict=True)]


def serve(server: Server, requests: list[Request], end: int | None = None) -> Served:
    """Answer all requests; an answer ends at its length, or after the token `end`."""
    cache, chunk = server.cache, server.model.sizes.chunk
    waiting, free = deque(range(len(requests))), list(range(len(server.lens)))
    running: dict[int, int] = {}  # the request of each slot
    reading: dict[int, int] = {}  # the number of tokens that a slot has read of its prompt, until it has read all
    answers: list[list[int]] = [[] for _ in requests]
    steps: list[float] = []
    most_running = waits = 0

    def add(slot: int, token: int) -> None:
        number = running[slot]
        answers[number].append(token)
        if token == end or len(answers[number]) == requests[number].answer:
            server.lens[slot] = 0
            cache.give_back(slot)
            del running[slot]
            free.append(slot)

    synchronize(DEVICE)
    begin = time.perf_counter()
    while waiting or running:
        while waiting and free:
            prompt, answer = requests[waiting[0]]
            if not cache.take(free[-1], len(prompt) + answer):
                waits += 1
                break
            running[free[-1]], reading[free.pop()] = waiting.popleft(), 0
        for slot, start_of_chunk in list(reading.items()):
            prompt = requests[running[slot]].prompt
            token = server.read(slot, prompt, start_of_chunk)
            reading[slot] += chunk
            if reading[slot] >= len(prompt):
                del reading[slot]
                server.lens[slot], server.tokens[slot] = len(prompt), token
                add(slot, int(token))
        decoding = running.keys() - reading.keys()
        if decoding:
            begin_of_step = time.perf_counter()
            server.step()
            tokens = server.tokens[:, 0].tolist()  # waits for the GPU
            steps.append(time.perf_counter() - begin_of_step)
            if len(steps) % 100 == 0:
                progress(f"{len(requests) - len(waiting) - len(running)} of {len(requests)} requests answered")
            for slot in decoding:
                add(slot, tokens[slot])
        most_running = max(most_running, len(decoding))
    return Served(answers, time.perf_counter() - begin, steps, most_running, waits)


# %% The reference has no cache: each sequence by itself, with a whole forward pass in float64 for each token.
def answer_alone(model: Model, request: Request) -> tuple[list[int], float]:
    """Return an answer, and the least difference between the best two scores."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own_k, own_v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return textbook(q, own_k, own_v, torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=DEVICE).tril())

    tokens, least = list(request.prompt), math.inf
    for _ in range(request.answer):
        positions = torch.arange(len(tokens), device=DEVICE)[None]
        best = model(torch.tensor([tokens], device=DEVICE), positions, attend)[0, -1].topk(2)
        least = min(least, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        if tokens[-1] == END:
            break
    return tokens[len(request.prompt) :], least


LOOPS: dict[str, tuple[type[PagedCache | RoomCache], bool]] = {
    "the loop, pages": (PagedCache, False),
    "the loop, SDPA + mask": (RoomCache, False),
}
if ON_GPU:
    LOOPS |= {f"{name}, CUDA graph": (cache, True) for name, (cache, _) in LOOPS.items()}


def check_loop() -> None:
    """Compare each answer of the loop with that of its sequence alone.

    The loop runs in float32. Its answers are the same if rounding never changes which score is the best, and here it
    does not: scores of random weights do not tie, and rounding changes them by 1e-5, much less than the difference
    between the best two.
    """
    requests, exact = make_requests(CHECKED), make_model(CHECKED, torch.float64)
    answers: list[list[int]] = []
    gaps: list[float] = []
    for request in requests:
        if len(answers) % 10 == 0:
            progress(f"{len(answers)} of {len(requests)} requests answered without a cache")
        answer, gap = answer_alone(exact, request)
        answers.append(answer)
        gaps.append(gap)
    progress("")
    early = sum(answer[-1] == END for answer in answers)
    print(f"\n{len(answers)} answers of {sum(map(len, answers))} tokens, {early} of them to the end token")
    print(f"check: the best two scores of each token are {min(gaps):.1e} apart or more (allowed 1e-03)")
    assert min(gaps) > 1e-3, "rounding may change the text: draw the requests from another seed"
    model = make_model(CHECKED, torch.float32)
    for name, (cache, in_graph) in LOOPS.items():
        server = Server(model, cache(CHECKED, torch.float32), in_graph)
        served = serve(server, requests, END)
        wrong = [n for n in range(len(requests)) if served.answers[n] != answers[n]]
        print(f"check: {name}: {len(wrong)} answers differ from those without a cache (allowed 0)")
        assert not wrong, f"the answers to the requests {wrong} differ"
        if isinstance(server.cache, PagedCache):
            print(f"{served.waits} times a request waited for pages; {served.most_running} sequences ran at a time")
            assert sorted(server.cache.free) == list(range(1, CHECKED.pages)), "a page was lost"
    print()


# %% Time the loop. All answers have their full length here: the work then is the same, whatever rounding does.
def time_loop() -> list[Row]:
    """Return the median time of a step, and the tokens of answers per second."""
    model, requests = make_model(TIMED, DTYPE), make_requests(TIMED)
    prompts, tokens = sum(len(r.prompt) for r in requests), sum(r.answer for r in requests)
    print(
        f"the loop: {len(requests)} requests, {prompts} tokens in prompts, {tokens} in answers, {TIMED.slots} slots, "
        f"pages of {TIMED.page_size}; {TIMED.layers} layers of {TIMED.heads} / {TIMED.kv_heads} heads"
    )
    rows: list[Row] = []
    for name, (cache, in_graph) in LOOPS.items():
        progress(name)
        server = Server(model, cache(TIMED, DTYPE), in_graph)
        serve(server, requests[:4])  # compiles
        served = serve(server, requests)
        assert [len(answer) for answer in served.answers] == [r.answer for r in requests]
        ms, a_second = statistics.median(served.steps) * 1e3, round(tokens / served.seconds)
        rows.append({"a step of decoding": name, "ms": float(f"{ms:.4g}"), "tokens a second": a_second})
    progress("")
    return rows


# %% Each part is checked first, then measured.
def main() -> None:
    """Check and time attention to both caches, then the loop."""
    file = start(__doc__)
    with torch.no_grad():
        check_caches()
        rows = time_caches()
        check_loop()
        rows += time_loop()
    note = (
        "GB/s counts the keys and values of the sequences; the blocks of such a step were planned before. A step of "
        "the\nloop is one of the whole model. Its tokens are those of the answers; prompts count in the time only."
    )
    finish(rows, file, note)


if __name__ == "__main__":
    main()
