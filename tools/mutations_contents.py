"""Mutations of the content keys: see tools/mutations.py."""
# ruff: noqa: E501 -- a table whose rows are exact text

from __future__ import annotations

from typing import Final

from tools.mutation import Mutation, of_file

KEYS: Final = "tests/core/test_content_key.py"
CONTENTS: Final = "tests/core/test_contents.py"
RETOLD: Final = "tests/core/test_contents_retold.py"
UNWRITTEN: Final = "tests/core/test_unwritten.py"
CONFIG: Final = "tests/house/test_config.py"
DOMAIN: Final = "[(f.name, getattr(domain, f.name)) for f in fields(domain)]"

CONTENT_MUTATIONS: Final[tuple[Mutation, ...]] = (
    *of_file(
        "kvguard/content_key.py",
        ("inputs of tokens that were taken back", RETOLD, "        self._inputs = [entry for entry in self._inputs if entry[0] < tokens]\n", ""),
        ("noted tokens that were taken back", RETOLD, "            del self._noted[tokens - self._hashed :]\n", "            pass\n"),
        *(
            (f"the domain's {name}", KEYS, DOMAIN, f"[(f.name, getattr(domain, f.name)) for f in fields(domain) if f.name != {name!r}]")
            for name in ("model", "weights_epoch", "kv_layout", "kv_dtype", "lora", "lora_revision", "tenant")
        ),
        ("the names of the fields", KEYS, DOMAIN, "[('', getattr(domain, f.name)) for f in sorted(fields(domain), key=lambda f: str(getattr(domain, f.name)))]"),
        ("the lengths of the fields", KEYS, "        parts += (len(part).to_bytes(8, \"little\"), part)\n", "        parts.append(part)\n"),
        ("the types of the fields", KEYS, "        return b\"i%d\" % int(value)\n", "        return b\"s%d\" % int(value)\n"),
        ("the field that is not there", KEYS, "        return b\"n\"\n", "        return b\"s\"\n"),
        ("the secret of the fields", KEYS, "digest = hashlib.blake2b(_encoded(kind, named), key=self._secret, digest_size=16)", "digest = hashlib.blake2b(_encoded(kind, named), digest_size=16)"),
        ("the secret of the positions", KEYS, "hashlib.shake_256(self._secret + named)", "hashlib.shake_256(named)"),
        ("words of their own for each block", KEYS, "((\"half\", half), (\"block\", block))", "((\"half\", half),)"),
        ("words of their own for each half", KEYS, "((\"half\", half), (\"block\", block))", "((\"block\", block),)"),
        ("the upper half of a token", KEYS, "        wide = bool(words.max() >> _32)\n", "        wide = False\n        words = words & _LOW\n"),
        ("what came before", KEYS, "            terms[:1] += self._sums[lane, start : start + 1]\n", ""),
        ("positions", KEYS, "self._hasher.words(b\"low\", start, stop)[lane]", "self._hasher.words(b\"low\", 0, stop - start)[lane]"),
        ("the domain in the sum", KEYS, "        self._sums[:, 0] = hasher.domain_words(domain)\n", ""),
        ("multimodal inputs", KEYS, "terms[position - start : position - start + 1] += np.array(digest[lane], np.uint64)", "pass"),
        ("multimodal inputs once only", KEYS, "            self._inputs = [entry for entry in self._inputs if entry[0] >= stop]\n", "            pass\n"),
        ("inputs behind what is known", KEYS, "            if given.position < self.tokens:\n", "            if False:\n"),
        ("tokens that were noted", KEYS, "        if tokens > self._hashed:\n            self._flush()\n", ""),
        ("tokens that were noted before an array", KEYS, "        words = token_words(tokens)\n        self._flush()\n", "        words = token_words(tokens)\n"),
        ("the refusal of what is no integer", KEYS, "tokens.dtype.kind not in \"iu\"", "tokens.dtype.kind not in \"iufb\""),
        ("the chance in a secret that nobody gave", KEYS, "    return secrets.token_bytes(SECRET_BYTES)\n", "    return bytes(SECRET_BYTES)\n"),
        ("the secret of the configuration", KEYS, "    if shared is not None:\n", "    if False:\n"),
    ),
    *of_file(
        "kvguard/content_calls.py",
        ("contents: what a publisher of this pass is made of", RETOLD, "        return wrong is None or not self._refuse_content(*wrong, index, page, state, column)\n", "        return True\n"),
        ("contents: publishers that were not identified", RETOLD, "            self._unidentified(writer if writer.content is None else state)\n            return False\n", "            return True\n"),
        ("contents: tokens that were taken back", RETOLD, "        content.cut(tokens)\n", "        pass\n"),
        ("contents: the comparison", CONTENTS, "        if own == binding.key:\n            return None\n", "        return None\n"),
        ("contents: the range of a hit", CONTENTS, "if size is not None and not column * size < tokens <= (column + 1) * size:", "if False:"),
        ("contents: the length of the request", CONTENTS, "            return Kind.CONTENT_TOO_SHORT, f", "            return None and f"),
        ("contents: pages that nothing is published in", CONTENTS, "            return Kind.CONTENT_UNBOUND, \"\"\n", "            return None\n"),
        ("contents: the fields in the report", CONTENTS, "        if fields:\n", "        if False:\n"),
        ("contents: publications beyond the tokens", CONTENTS, "return False if self._refuse_content(Kind.PUBLISH_BEYOND, detail, index, page, state, column) else None", "return None"),
        ("contents: publications of the unidentified", CONTENTS, "            self._unidentified(state)\n            return False\n", "            return None\n"),
        ("contents: another identity while pages are held", CONTENTS, "            if before.key(shared) != content.key(shared):\n", "            if False:\n"),
        ("contents: the store's binding", CONTENTS, "problem = self._difference(state.content, binding, index, column + accepted)", "problem = None"),
        ("contents: keys that the store no longer has", CONTENTS, "                self._books.stored.pop((name, key), None)\n", "                pass\n"),
        ("contents: keys that were never stored", CONTENTS, "            if binding is None:\n                return accepted\n            problem", "            if binding is None:\n                continue\n            problem"),
        ("contents: hits that were not loaded", CONTENTS, "            if key in done:\n", "            if True:\n"),
        ("contents: tokens beyond the pages of a lookup", UNWRITTEN, "        if not self._contents or size is None or tokens <= columns * size:\n", "        if True:\n"),
        ("contents: loads up to the first that failed", UNWRITTEN, "                accepted = place\n                break\n", "                accepted = place\n"),
        ("contents: loads that were completed", UNWRITTEN, "            state.loaded = (column + accepted) * (self._books.tables[0].spec.page_size or 0)\n", "            pass\n"),
        ("contents: all is told below level keys", UNWRITTEN, "        self._books.all_is_told = self._contents\n", "        self._books.all_is_told = True\n"),
        ("contents: a page under another key is stored", CONTENTS, "binding = None if table.problem_with_adoption(page, key) else table.record(page).content", "binding = table.record(page).content"),
        ("contents: fingerprints in place of keys", CONTENTS, "content {fingerprint(binding.key)}\"", "content {binding.key.first_lane:x}\""),
    ),
    *of_file(
        "kvguard/bookkeeping.py",
        ("contents: the check of an adoption", CONTENTS, "            if self._contents and state.content is not None:\n", "            if False and state.content is not None:\n"),
        ("contents: a page that a load filled", RETOLD, "holds = need if size is None or need > column * size else", "holds = need if True else"),
        ("contents: hits of the unidentified", CONTENTS, "                if refusable:\n                    return 0\n", "                pass\n"),
        ("contents: hits that cannot be refused", CONTENTS, "if problem is not None else table.invent_tag()", "if True else table.invent_tag()"),
        ("contents: the binding of a publication", CONTENTS, "        table.publish(page, key, promise, request, content)\n", "        table.publish(page, key, promise, request)\n"),
        ("contents: one key for two contents", CONTENTS, "            return not self._refuse_content(Kind.PUBLISH_CONTENT, detail, index, page, state, column)\n", "            return True\n"),
    ),
    *of_file(
        "kvguard/handover.py",
        ("contents: the vetting of hits", CONTENTS, "                if wrong is not None and self._refuse_content(*wrong, index, page, state, column):\n", "                if False:\n"),
        ("contents: the columns of hits", RETOLD, "                column = columns[accepted]\n", "                column = accepted\n"),
    ),
    *of_file(
        "kvguard/requests.py",
        ("contents: loads of an earlier life", UNWRITTEN, "        state.computed = state.floor = state.loaded = 0\n", "        state.computed = state.floor = 0\n"),
    ),
    *of_file(
        "kvguard/steps.py",
        ("contents: the look at first steps", UNWRITTEN, "        look_at_first_steps(books, pending, tokens_start)\n", "        pass\n"),
        ("contents: first steps where not all is told", UNWRITTEN, "    if books.all_is_told and tokens_start is not None", "    if tokens_start is not None"),
    ),
    *of_file(
        "kvguard/unwritten.py",
        ("contents: first steps that were only observed", UNWRITTEN, "        if start == 0 or state.computed or state.stalled", "        if start == 0 or state.computed"),
        ("contents: what a store has loaded", UNWRITTEN, "        given = max(state.loaded, _adopted_tokens(books, state))\n", "        given = _adopted_tokens(books, state)\n"),
        ("contents: what was adopted", UNWRITTEN, "        given = max(state.loaded, _adopted_tokens(books, state))\n", "        given = state.loaded\n"),
        ("contents: first steps in flight", UNWRITTEN, "        if start > given and not books.scheduled_tokens(state):\n", "        if start > given:\n"),
        ("contents: first steps at the end of what was given", UNWRITTEN, "        if start > given and not", "        if start >= given and not"),
        ("contents: pages of its own", UNWRITTEN, "next((column for column, _, tag in ledger.entries() if tag not in state.adopted), len(ledger))", "len(ledger)"),
        ("contents: pages that were published in part", UNWRITTEN, "            tokens = min(tokens, record.content.key.tokens)\n", "            pass\n"),
        ("contents: the pool that has least", UNWRITTEN, "        given = min(given, tokens)\n", "        given = tokens\n"),
    ),
    *of_file(
        "kvguard/judge.py",
        ("contents: the name of what was never written", UNWRITTEN, ", Kind.CONTENT_UNWRITTEN: Proof.CONTENT_KEY}", "}"),
    ),
    *of_file(
        "kvguard/page_table.py",
        ("contents: a page that was handed on", CONTENTS, "            record.former = (record.publication, record.tag)\n        record.publication = record.promise = record.content = None\n", "            record.former = (record.publication, record.tag)\n        record.publication = record.promise = None\n"),
        ("contents: a page that left the cache", CONTENTS, "        promise = record.promise\n        record.publication = record.promise = record.content = None\n", "        promise = record.promise\n        record.publication = record.promise = None\n"),
        ("contents: a promise that was broken", CONTENTS, "            record.publication = record.content = None\n", "            record.publication = None\n"),
    ),
    *of_file(
        "kvguard/guard.py",
        ("contents: the level", CONTENTS, "                Proof.CONTENT_KEY: config.level == \"keys\",\n", ""),
    ),
    *of_file(
        "kvguard/books.py",
        ("the count of errors of the adapter", "tests/core/test_generic_adapter.py", "        self.counters.adapter_errors += 1\n", ""),
        ("contents: the shared secret", CONTENTS, "draw_content_secret(None if shared is None else shared.get_secret_value(), config.seed)", "draw_content_secret(None, config.seed)"),
    ),
    *of_file(
        "kvguard/config.py",
        ("a secret that is too short", CONFIG, "len(value.get_secret_value()) < SECRET_CHARACTERS_MIN", "False"),
        ("a secret in an error message", CONFIG, "value = \"the value\" if name == \"content_key_secret\" else _written(detail[\"input\"])", "value = _written(detail[\"input\"])"),
    ),
)  # fmt: skip
