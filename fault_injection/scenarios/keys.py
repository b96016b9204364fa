"""Bugs of what a cached page is found by: hashes that collide, and keys that leave something out."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from collections.abc import Sequence as Listed

from kvguard.fault_injection.engine.engine import Engine
from kvguard.fault_injection.engine.pool import chain_keys
from kvguard.fault_injection.engine.scheduler import Sequence
from kvguard.fault_injection.scenarios.embedded import EmbeddedReplay, ask, patch, text, when
from kvguard.fault_injection.scenarios.media import MediaEngine, hash_of_image, image_key_tokens, two_images
from kvguard.fault_injection.scenarios.scenario import Scenario
from kvguard.fault_injection.traffic import Arrival
from kvguard.violation import Proof

__all__ = ["KEY_SCENARIOS"]

VOCABULARY = 97
KeysOf = Callable[[Sequence, list[int]], list[int]]


def _keyed(make: Callable[[Engine], KeysOf]) -> Callable[[Engine], None]:
    """The engine makes its cache keys in this way."""

    def install(engine: Engine) -> None:
        engine.scheduler.keys_of = make(engine)

    return install


def _chained(engine: Engine, tokens: Listed[int], tenant: str = "", lora: str = "") -> list[int]:
    return chain_keys(tokens, engine.config.page_size, tenant, lora)


def _page_ends(engine: Engine, tokens: Listed[int]) -> range:
    return range(engine.config.page_size, len(tokens) + 1, engine.config.page_size)


def _rolling_hash(tokens: Listed[int]) -> int:
    value = 7
    for token in tokens:
        value = (value * 31 + token) % (1 << 61)
    return value


def _rolling(engine: Engine) -> KeysOf:
    return lambda sequence, tokens: [_rolling_hash(tokens[:end]) for end in _page_ends(engine, tokens)]


def _one_up_one_down(rng: random.Random) -> list[Arrival]:
    """In each page token j is raised by 1 and token j + 1 lowered by 31: the hash is the same."""
    ids = [0, *(rng.randrange(40, 60) for _ in range(30)), 1]
    other = list(ids)
    for page in range(4):
        other[8 * page + 3] += 1
        other[8 * page + 4] -= 31
    return [ask("a", ids, new=4), ask("b", other, at=3, new=14)]


def _crc(engine: Engine) -> KeysOf:
    return lambda sequence, tokens: [zlib.crc32(bytes(tokens[:end])) for end in _page_ends(engine, tokens)]


def _two_of_one_crc(rng: random.Random) -> list[Arrival]:
    """Two prompts whose first page has one CRC: found among some hundred thousand, as an attacker would."""
    seen: dict[int, bytes] = {}
    while True:
        page = bytes([0, *(rng.randrange(2, VOCABULARY) for _ in range(7))])
        other = seen.setdefault(zlib.crc32(page), page)
        if other != page:
            break
    # Equal CRCs stay equal behind equal tokens: the second page has one key, too.
    tail = [rng.randrange(2, VOCABULARY) for _ in range(12)]
    return [ask("a", [*other, *tail, 1], new=4), ask("b", [*page, *tail, 1], at=3, new=14)]


def _hash_only(engine: Engine) -> KeysOf:
    """A page goes by a hash of 12 bits, and nothing compares the tokens behind it."""
    plain = engine.scheduler.keys_of
    return lambda sequence, tokens: [key % 4096 for key in plain(sequence, tokens)]


def _two_of_one_hash(rng: random.Random) -> list[Arrival]:
    seen: dict[int, list[int]] = {}
    while True:
        ids = [0, *(rng.randrange(2, VOCABULARY) for _ in range(11)), 1]
        other = seen.setdefault(chain_keys(ids, 8)[0] % 4096, ids)
        if other != ids:
            return [ask("a", other, new=4), ask("b", ids, at=3, new=14)]


def _without_adapter(engine: Engine) -> KeysOf:
    return lambda sequence, tokens: _chained(engine, tokens, sequence.request.tenant)


def _with_and_without_adapter(rng: random.Random) -> list[Arrival]:
    prompt = text(rng, 70)
    return [ask("base", prompt, new=4), ask("adapted", prompt, at=5, new=60, lora="de")]


def _adapter_by_name(engine: Engine) -> KeysOf:
    """Of `name#id` only the name counts."""
    return lambda sequence, tokens: _chained(
        engine, tokens, sequence.request.tenant, sequence.request.lora.partition("#")[0]
    )


def _two_adapters_of_one_name(rng: random.Random) -> list[Arrival]:
    prompt = text(rng, 70)
    return [ask("one", prompt, new=4, lora="fr#1"), ask("two", prompt, at=5, new=60, lora="fr#2")]


def _without_salt(engine: Engine) -> KeysOf:
    return lambda sequence, tokens: _chained(engine, tokens, "", sequence.request.lora)


def _five_salts(rng: random.Random) -> list[Arrival]:
    prompt = text(rng, 30)
    return [ask(f"t{number}", prompt, at=3 * number, new=4, tenant=f"salt{number}") for number in range(5)]


def _untagged(engine: Engine) -> KeysOf:
    """Adapter and salt stand in one tuple, and nothing says which is which."""

    def keys(sequence: Sequence, tokens: list[int]) -> list[int]:
        request = sequence.request
        extra = tuple(part for part in (request.lora, request.tenant) if part)
        return _chained(engine, tokens, repr(extra))

    return keys


def _salt_like_an_adapter(rng: random.Random) -> list[Arrival]:
    prompt = text(rng, 70)
    return [ask("adapted", prompt, new=4, lora="de"), ask("salted", prompt, at=5, new=60, tenant="de")]


def _images_alike(engine: Engine) -> KeysOf:
    """All placeholders of images have one id, and that is all that is hashed."""
    return lambda sequence, tokens: _chained(engine, image_key_tokens(sequence, tokens, lambda image: ()))


def _image_hash_of_16_bits(engine: Engine) -> KeysOf:
    """The image's hash, cut to 16 bits, stands in place of each placeholder."""
    return lambda sequence, tokens: _chained(
        engine, image_key_tokens(sequence, tokens, lambda image: (hash_of_image(image) & 0xFFFF,))
    )


def _question_about_two(bits: int) -> Callable[[random.Random], list[Arrival]]:
    def arrivals(rng: random.Random) -> list[Arrival]:
        first, second = two_images(rng, bits)
        question = "what is it?"
        return [ask("a", first.prompt(question), new=4), ask("b", second.prompt(question), at=3, new=14)]

    return arrivals


def _ids_of_embeddings(engine: Engine) -> KeysOf:
    """Requests that supply embeddings have the same id for each of their tokens."""
    return lambda sequence, tokens: _chained(engine, [0] * len(tokens))


def _equal_ids_other_vectors(rng: random.Random) -> list[Arrival]:
    return [ask("a", text(rng, 30), new=4), ask("b", text(rng, 30), at=3, new=14)]


def _new_weights_before(step: int) -> Callable[[Engine], None]:
    return when(step, lambda engine: engine.update_weights())


def _keep_prefixes(engine: Engine) -> None:
    patch(engine, "update_weights", lambda plain: lambda: plain(keep_cache=True))


def _before_and_after(rng: random.Random) -> list[Arrival]:
    prompt = text(rng, 70)
    return [ask("before", prompt, new=4), ask("after", prompt, at=7, new=60)]


def _sleep_and_wake(engine: Engine) -> None:
    """Asleep before step 6, awake before step 8 with weights that were put there meanwhile: nobody runs in between."""

    def wake(running: Engine) -> None:
        running.weights_epoch += 1
        running.scheduler.counts.weight_updates += 1

    when(6, lambda running: running.pool.reset_cache())(engine)
    when(8, wake)(engine)


def _sleep_forgets_nothing(engine: Engine) -> None:
    engine.pool.reset_cache = lambda: []  # type: ignore[method-assign]


def _asleep_when_it_comes(rng: random.Random) -> list[Arrival]:
    prompt = text(rng, 70)
    return [ask("rollout1", prompt, new=3), ask("rollout2", prompt, at=8, new=60)]


def _wrong_parent_when_full(engine: Engine) -> KeysOf:
    """Where a prompt fills its pages exactly, the next page's hash goes on from the last one but one."""
    plain = engine.scheduler.keys_of

    def keys(sequence: Sequence, tokens: list[int]) -> list[int]:
        size, prompt = engine.config.page_size, len(sequence.request.prompt)
        made = plain(sequence, tokens)
        if prompt % size == 0 and len(made) > prompt // size:
            made[prompt // size :] = plain(sequence, [*tokens[: prompt - size], *tokens[prompt:]])[prompt // size - 1 :]
        return made

    return keys


def _prompt_of_whole_pages(rng: random.Random) -> list[Arrival]:
    """32 tokens, that is four pages, and an answer; then a prompt of three of them and what the answer begins with."""
    ids = ask("", text(rng, 30)).request.prompt
    # The answer recites the text.
    other = (*ids[:24], *ids[1:9], *ids[20:24], 1)
    return [ask("a", ids, new=12), ask("b", other, at=13, new=14)]


def _any_saved_talk(engine: Engine) -> None:
    """A slot that is new is filled from the saved talk that is longest, whatever was asked."""
    pool = engine.pool
    plain = pool.lookup
    saved: list[tuple[int, int]] = []

    def lookup(keys: list[int]) -> list[tuple[int, int]]:
        hits = plain(keys)
        saved[:] = [(key, page) for page, key in sorted(pool.key_of.items())]
        return hits or saved[: len(keys)]

    pool.lookup = lookup  # type: ignore[method-assign,assignment]


def _two_conversations(rng: random.Random) -> list[Arrival]:
    return [ask("alice", text(rng, 30), new=4), ask("bob", text(rng, 46), at=5, new=14)]


def _position_ignored(engine: Engine) -> KeysOf:
    """Chunks are found by their own tokens, wherever they stand now."""

    def keys(sequence: Sequence, tokens: list[int]) -> list[int]:
        size = engine.config.page_size
        return [hash(tuple(tokens[end - size : end])) for end in _page_ends(engine, tokens)]

    return keys


def _words_shifted(rng: random.Random) -> list[Arrival]:
    """The cache has pages a b c d e; what is asked is a b d e."""
    words = [text(random.Random(rng.random()), 8) for _ in range(5)]
    whole = [0, *(ord(character) - 30 for word in words for character in word)]
    shifted = [*whole[:16], *whole[24:]]
    return [ask("a", [*whole, 1], new=4), ask("b", [*shifted, 1], at=3, new=14)]


def _key_scenario(
    name: str, link: str, reported_in: str, story: str, replay: EmbeddedReplay
) -> Scenario:
    """The comparison of contents finds it, before the page is taken: nobody is ended."""
    return Scenario(
        name=name, link=link, reported_in=reported_in, family="keys", proof=Proof.CONTENT_KEY, story=story,
        replay=replay, page_size=replay.config.page_size,
    )


KEY_SCENARIOS = (
    _key_scenario(
        "rolling-hash-collides",
        "https://github.com/NVIDIA/Megatron-LM/pull/4158",
        "Megatron-LM",
        "A polynomial rolling hash: raise one token by 1, lower the next by 31, and the page has the same key.",
        EmbeddedReplay(arrivals=_one_up_one_down, bug=_keyed(_rolling)),
    ),
    _key_scenario(
        "fast-hash-collides",
        "https://github.com/vllm-project/vllm/pull/54727",
        "vLLM",
        "A fast hash that is not cryptographic (here CRC-32): two prompts of one key are found in a second.",
        EmbeddedReplay(arrivals=_two_of_one_crc, bug=_keyed(_crc)),
    ),
    _key_scenario(
        "hash-kept-without-tokens",
        "https://github.com/openvinotoolkit/openvino.genai/issues/3722",
        "OpenVINO GenAI",
        "A cached page keeps nothing but its hash, and a hit compares nothing else (the hash is cut to 12 bits here).",
        EmbeddedReplay(arrivals=_two_of_one_hash, bug=_keyed(_hash_only)),
    ),
    _key_scenario(
        "adapter-not-in-key",
        "https://github.com/vllm-project/vllm/issues/3264",
        "vLLM",
        "The first version of prefix caching hashes tokens only: a request with a LoRA adapter gets the base model's.",
        EmbeddedReplay(arrivals=_with_and_without_adapter, bug=_keyed(_without_adapter)),
    ),
    _key_scenario(
        "adapters-of-one-name",
        "https://github.com/vllm-project/vllm/issues/30931",
        "vLLM",
        "The key has the adapter's name and not its id: two adapters of one name share pages.",
        EmbeddedReplay(arrivals=_two_adapters_of_one_name, bug=_keyed(_adapter_by_name)),
    ),
    _key_scenario(
        "salt-lost-on-the-way",
        "https://github.com/kvcache-ai/ktransformers/issues/2184",
        "ktransformers",
        "The tenant's salt is computed and carried and never reaches the request: five salts, one prompt, one entry.",
        EmbeddedReplay(arrivals=_five_salts, bug=_keyed(_without_salt)),
    ),
    _key_scenario(
        "salt-equal-to-adapter",
        "https://github.com/vllm-project/vllm/issues/44701",
        "vLLM",
        "Adapter name and salt are appended to one tuple untagged: a salt that reads like an adapter's name hits its "
        "pages.",
        EmbeddedReplay(arrivals=_salt_like_an_adapter, bug=_keyed(_untagged)),
    ),
    _key_scenario(
        "images-hash-alike",
        "https://github.com/LMCache/LMCache/issues/690",
        "LMCache",
        "Placeholder tokens of images are hashed as they are: all images are one.",
        EmbeddedReplay(arrivals=_question_about_two(0), bug=_keyed(_images_alike), engine_type=MediaEngine),
    ),
    _key_scenario(
        "image-hash-cut-to-16-bits",
        "https://github.com/LMCache/LMCache/issues/4086",
        "LMCache",
        "The image's hash is cut to 16 bits and repeated over the placeholders: two images that share them are one.",
        EmbeddedReplay(arrivals=_question_about_two(16), bug=_keyed(_image_hash_of_16_bits), engine_type=MediaEngine),
    ),
    _key_scenario(
        "embeddings-not-in-key",
        "https://github.com/InternLM/lmdeploy/issues/4933",
        "lmdeploy",
        "Supplied embeddings are no part of the key: two requests of equal ids and other vectors are one.",
        EmbeddedReplay(arrivals=_equal_ids_other_vectors, bug=_keyed(_ids_of_embeddings)),
    ),
    _key_scenario(
        "prefixes-kept-over-update",
        "https://github.com/InternLM/lmdeploy/issues/4917",
        "lmdeploy",
        "A hot weight update keeps the prefixes of the old weights.",
        EmbeddedReplay(arrivals=_before_and_after, bug=_keep_prefixes, setting=_new_weights_before(7)),
    ),
    _key_scenario(
        "prefixes-kept-over-sleep",
        "https://github.com/NVIDIA-NeMo/RL/pull/112",
        "NeMo-RL",
        "Sleep does not reset the prefix cache, and the engine wakes with the next policy's weights.",
        EmbeddedReplay(arrivals=_asleep_when_it_comes, bug=_sleep_forgets_nothing, setting=_sleep_and_wake),
    ),
    _key_scenario(
        "stored-under-wrong-hash",
        "https://github.com/openvinotoolkit/model_server/issues/4376",
        "OpenVINO model server",
        "Where the prompt is a whole number of pages the list of hashes is indexed wrongly, and what comes next is "
        "stored under another page's hash.",
        EmbeddedReplay(arrivals=_prompt_of_whole_pages, bug=_keyed(_wrong_parent_when_full)),
    ),
    _key_scenario(
        "finished-talk-restored",
        "https://github.com/ggml-org/llama.cpp/issues/27148",
        "llama.cpp",
        "A prompt cache restores another, finished conversation into a fresh slot.",
        EmbeddedReplay(arrivals=_two_conversations, bug=_any_saved_talk),
    ),
    _key_scenario(
        "chunks-matched-after-shift",
        "https://github.com/ggml-org/llama.cpp/pull/12161",
        "llama.cpp",
        "Chunks of a prompt are found again behind a part that was cut out, with positions of before the cut.",
        EmbeddedReplay(arrivals=_words_shifted, bug=_keyed(_position_ignored)),
    ),
)
