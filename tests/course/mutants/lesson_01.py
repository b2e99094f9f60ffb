"""Wrong solutions of lesson 01's exercises."""

from collections import Counter
from itertools import pairwise

from minillm.tokenizer.gemma import BYTE_TOKENS
from minillm.tokenizer.training import join_pair
from tests.course.mutants import wrong

FIRST = "the pair learned first is joined first"


@wrong("bpe_merge", fails=FIRST)
def leftmost_pair(symbols, ranks):
    symbols = list(symbols)
    while True:
        place = next((i for i, pair in enumerate(pairwise(symbols)) if pair in ranks), None)
        if place is None:
            return symbols
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]


@wrong("bpe_merge", fails=FIRST)
def longest_from_the_left(symbols, ranks):
    out = []
    for symbol in symbols:
        if out and (out[-1], symbol) in ranks:
            out[-1] += symbol
        else:
            out.append(symbol)
    return out


@wrong("bpe_merge", fails="what a join makes can be joined again")
def only_the_first_pairs(symbols, ranks):
    known = set(pairwise(symbols))
    for pair in sorted(known & ranks.keys(), key=ranks.get):
        symbols = join_pair(symbols, *pair)
    return list(symbols)


@wrong("bpe_merge", fails="what a join makes can be joined again")
def one_pass_over_the_ranks(symbols, ranks):
    for pair in sorted(ranks, key=ranks.get):
        symbols = join_pair(symbols, *pair)
    return list(symbols)


@wrong("bpe_merge", fails="a pair is joined wherever it occurs")
def first_place_of_each_pair(symbols, ranks):
    symbols, left = list(symbols), dict(ranks)
    while True:
        found = [(left[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in left]
        if not found:
            return symbols
        place = min(found)[1]
        del left[symbols[place], symbols[place + 1]]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]


@wrong("bpe_merge", fails="where places overlap, the left one is joined")
def rightmost_place(symbols, ranks):
    symbols = list(symbols)
    while True:
        found = [(ranks[pair], -i) for i, pair in enumerate(pairwise(symbols)) if pair in ranks]
        if not found:
            return symbols
        place = -min(found)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]


@wrong("bpe_merge", fails="only a pair that has a rank is joined")
def by_the_joined_text(symbols, ranks):
    symbols, texts = list(symbols), {left + right: rank for (left, right), rank in ranks.items()}
    while True:
        found = [(texts[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in texts]
        if not found:
            return symbols
        place = min(found)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]


@wrong("bpe_merge", fails="the rank is the number, whatever the order of the dict")
def in_the_order_of_the_dict(symbols, ranks):
    symbols = list(symbols)
    while True:
        here = list(pairwise(symbols))
        place = next((here.index(pair) for pair in ranks if pair in here), None)
        if place is None:
            return symbols
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]


@wrong("bpe_merge", fails="a word may have nothing to join")
def joins_at_least_once(symbols, ranks):
    symbols = list(symbols)
    while True:
        found = [(ranks.get(pair, 10**6), i) for i, pair in enumerate(pairwise(symbols))]
        if not found:
            return symbols or [""]
        rank, place = min(found)
        if rank == 10**6:
            return symbols
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]


@wrong("bpe_merge", fails="the arguments do not change")
def modifies_the_callers_list(symbols, ranks):
    while found := [(ranks[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in ranks]:
        place = min(found)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    return symbols


def learn(word_counts, steps, weight=lambda count: count, order=lambda pair: pair, join=join_pair, places=pairwise):
    words = [(list(word), count) for word, count in word_counts.items()]
    merges = []
    while len(merges) < steps:
        counts = Counter()
        for symbols, count in words:
            for pair in places(symbols):
                counts[pair] += weight(count)
        if not counts:
            break
        merges.append(min(counts, key=lambda pair: (-counts[pair], order(pair))))
        words = [(join(symbols, *merges[-1]), count) for symbols, count in words]
    return merges


@wrong("learn_merges", fails="a word counts as often as it occurs")
def each_word_once(word_counts, steps):
    return learn(word_counts, steps, weight=lambda count: 1)


@wrong("learn_merges", fails="no pair reaches across words")
def one_long_text(word_counts, steps):
    return learn({"".join(word * count for word, count in word_counts.items()): 1}, steps)


@wrong("learn_merges", fails="of equal counts, the pair that sorts first wins")
def first_met(word_counts, steps):
    return learn(word_counts, steps, order=lambda pair: 0)


@wrong("learn_merges", fails="of equal counts, the pair that sorts first wins")
def last_in_order(word_counts, steps):
    return learn(word_counts, steps, order=lambda pair: [-ord(character) for character in "".join(pair)])


@wrong("learn_merges", fails="counts follow each join")
def counted_once(word_counts, steps):
    counts = Counter()
    for word, count in word_counts.items():
        for pair in pairwise(word):
            counts[pair] += count
    return sorted(counts, key=lambda pair: (-counts[pair], pair))[:steps]


@wrong("learn_merges", fails="a pair is joined at all its places in a word")
def first_place_in_each_word(word_counts, steps):
    def join_first(symbols, left, right):
        for i, pair in enumerate(pairwise(symbols)):
            if pair == (left, right):
                return [*symbols[:i], left + right, *symbols[i + 2 :]]
        return symbols

    return learn(word_counts, steps, join=join_first)


@wrong("learn_merges", fails="of equal counts, the pair that sorts first wins")
def sorted_by_the_joined_text(word_counts, steps):
    return learn(word_counts, steps, order="".join)


@wrong("learn_merges", fails="a pair counts at every place in a word")
def once_for_each_word(word_counts, steps):
    return learn(word_counts, steps, places=lambda symbols: set(pairwise(symbols)))


@wrong("learn_merges", fails="a pair counts at every place in a word")
def overlapping_places_once(word_counts, steps):
    def places(symbols):
        last = None
        for pair in pairwise(symbols):
            last = None if pair == last and pair[0] == pair[1] else pair
            if last:
                yield pair

    return learn(word_counts, steps, places=places)


@wrong("learn_merges", fails="only whole symbols are joined")
def replaces_text(word_counts, steps):
    def join(symbols, left, right):
        return " ".join(symbols).replace(f"{left} {right}", left + right).split(" ")

    return learn(word_counts, steps, join=join)


@wrong("learn_merges", fails="the caller's counts do not change")
def takes_words_out_of_the_dict(word_counts, steps):
    merges = learn(word_counts, steps)
    for word in [word for word in word_counts if len(word) < 3]:
        del word_counts[word]
    return merges


class Stream:
    """A correct stream, the base of the wrong ones."""

    def __init__(self, special):
        self.special = special
        self.run = bytearray()

    def push(self, token):
        if token in self.special:
            return ""
        if token in BYTE_TOKENS:
            self.run.append(BYTE_TOKENS.index(token))
            return ""
        return self.finish() + self.text(token)

    def text(self, token):
        return token.replace("▁", " ")

    def finish(self):
        run = bytes(self.run)
        self.run.clear()
        return self.decode(run)

    def decode(self, run):
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)


@wrong("TextStream", fails="text that is certain is returned at once")
class AllAtTheEnd(Stream):
    def __init__(self, special):
        super().__init__(special)
        self.tokens = []

    def push(self, token):
        self.tokens.append(token)
        return ""

    def finish(self):
        stream = Stream(self.special)
        tokens, self.tokens = self.tokens, []
        return "".join(stream.push(token) for token in tokens) + stream.finish()


@wrong("TextStream", fails="a run of bytes waits until it ends")
class EachCharacterAtOnce(Stream):
    """Emits a character as soon as its bytes are complete, and takes it back into account if the run breaks."""

    shown = ""

    def push(self, token):
        if token not in BYTE_TOKENS:
            return super().push(token)
        self.run.append(BYTE_TOKENS.index(token))
        try:
            text = bytes(self.run).decode()
        except UnicodeDecodeError:
            return ""
        new, self.shown = text[len(self.shown) :], text
        return new

    def finish(self):
        shown, self.shown = len(self.shown), ""
        whole = super().finish()
        return whole if "\ufffd" in whole else whole[shown:]


@wrong("TextStream", fails="finish() begins an empty run")
class RunKept(Stream):
    def push(self, token):
        text = super().push(token)
        if token not in BYTE_TOKENS and token not in self.special:
            self.run.clear()
        return text

    def finish(self):
        return self.decode(bytes(self.run))


@wrong("TextStream", fails="a ▁ that was spelled in bytes stays")
class ReplacesAtTheEnd(Stream):
    def decode(self, run):
        return super().decode(run).replace("▁", " ")


@wrong("TextStream", fails="a run of bytes waits until it ends")
class AsciiAtOnce(Stream):
    def push(self, token):
        if token in BYTE_TOKENS and not self.run and BYTE_TOKENS.index(token) < 128:
            return chr(BYTE_TOKENS.index(token))
        return super().push(token)


@wrong("TextStream", fails="a special token does not end a run")
class SpecialClearsTheRun(Stream):
    def push(self, token):
        if token in self.special:
            self.run.clear()
        return super().push(token)


@wrong("TextStream", fails="a special token does not end a run")
class SpecialEndsTheRun(Stream):
    def push(self, token):
        return self.finish() if token in self.special else super().push(token)


@wrong("TextStream", fails="in a broken run, each byte becomes one \ufffd")
class BrokenPartsReplaced(Stream):
    """Decodes what can be decoded, as UTF-8 decoders usually do."""

    def decode(self, run):
        return run.decode(errors="replace")


@wrong("TextStream", fails="half a character is never shown")
class RedecodesTheRunAtEachByte(Stream):
    shown = 0

    def push(self, token):
        if token not in BYTE_TOKENS:
            return super().push(token)
        self.run.append(BYTE_TOKENS.index(token))
        text = self.decode(bytes(self.run))
        if "\ufffd" not in text:
            return ""
        new, self.shown = text[self.shown :], len(text)
        return new

    def finish(self):
        shown, self.shown = self.shown, 0
        return super().finish()[shown:]


@wrong("TextStream", fails="finish() returns what was kept")
class TailLost(Stream):
    def push(self, token):
        if token in self.special or token in BYTE_TOKENS:
            return super().push(token)
        return super().finish() + self.text(token)

    def finish(self):
        return ""


@wrong("TextStream", fails="every ▁ in a token is a space, the first one too")
class FirstSpaceTaken(Stream):
    first = True

    def text(self, token):
        self.first, first = False, self.first
        return super().text(token).lstrip() if first else super().text(token)


@wrong("TextStream", fails="special tokens have no text, all others have")
class SpecialShown(Stream):
    def push(self, token):
        return token if token in self.special else super().push(token)


@wrong("TextStream", fails="in a broken run, each byte becomes one \ufffd")
class BrokenBytesSwallowed(Stream):
    def decode(self, run):
        return run.decode(errors="ignore")


EVERYBODY = ("user", "assistant")


def render(
    messages, add_generation_prompt=True, role="model", bos="<bos>", each="", close="", prompt=None, trim=EVERYBODY
):
    text = bos
    for message in messages:
        speaker = role if message["role"] == "assistant" else message["role"]
        end = close if close and speaker == "model" else "<end_of_turn>\n"
        content = message["content"].strip() if message["role"] in trim else message["content"]
        text += f"{each}<start_of_turn>{speaker}\n{content}{end}"
    return text + ("<start_of_turn>model\n" if prompt is None else prompt) * add_generation_prompt


@wrong("render_chat", fails="the assistant is called model")
def role_as_it_came(messages, add_generation_prompt=True):
    return render(messages, add_generation_prompt, role="assistant")


@wrong("render_chat", fails="it ends where the model continues")
def newline_forgotten(messages, add_generation_prompt=True):
    return render(messages, add_generation_prompt, prompt="<start_of_turn>model")


@wrong("render_chat", fails="it ends where the model continues")
def no_generation_prompt(messages, add_generation_prompt=True):
    return render(messages, False)


@wrong("render_chat", fails="it ends where the model continues")
def generation_prompt_only_after_a_user_turn(messages, add_generation_prompt=True):
    return render(messages, add_generation_prompt and messages[-1]["role"] == "user")


@wrong("render_chat", fails="one <bos>, at the start")
def each_turn_begins_a_text(messages, add_generation_prompt=True):
    return render(messages, add_generation_prompt, bos="", each="<bos>")


@wrong("render_chat", fails="every turn is closed")
def models_turns_left_open(messages, add_generation_prompt=True):
    return render(messages, add_generation_prompt, close="\n")


@wrong("render_chat", fails="white space around a message is dropped")
def content_as_it_came(messages, add_generation_prompt=True):
    return render(messages, add_generation_prompt, trim=())


@wrong("render_chat", fails="white space around a message is dropped")
def only_the_users_content_stripped(messages, add_generation_prompt=True):
    return render(messages, add_generation_prompt, trim=("user",))


@wrong("render_chat", fails="turns follow each other in order, with nothing between them")
def turns_joined_by_newlines(messages, add_generation_prompt=True):
    turns = [render([message], False, bos="") for message in messages]
    return "<bos>" + "\n".join(turns) + "<start_of_turn>model\n" * add_generation_prompt


@wrong("render_chat", fails="turns follow each other in order, with nothing between them")
def latest_turn_first(messages, add_generation_prompt=True):
    return render(messages[::-1], add_generation_prompt)


@wrong("render_chat", fails="only roles are renamed, not words of a message")
def renamed_in_the_text(messages, add_generation_prompt=True):
    return render(messages, add_generation_prompt, role="assistant").replace("assistant", "model")


@wrong("render_chat", fails="the caller's messages do not change")
def stripped_in_place(messages, add_generation_prompt=True):
    for message in messages:
        message["content"] = message["content"].strip()
    return render(messages, add_generation_prompt)
