"""How much of the evidence for a question is in the context that a token budget allows, without a server or a judge.

    python benchmarks/context.py --data FILE [--conversations odd] [--budgets 500 1000 2000 4000]

FILE has LoCoMo's format (`locomo10.json`: a list of {"sample_id", "conversation", "qa"}). One conversation is one thread,
each annotated question the next message. For every budget the context is built by the product's own ranking and packing,
and a turn that holds the answer counts when its whole text is in it. Printed for each category: mean share of the
evidence that is in (recall), and in brackets the share of questions with all of it. Everything is printed for the shipped
settings, for each part switched off in turn, and for the simple designs that people build first; then what each loses
against the shipped settings, and how much of that may be chance.

Must never choose weights on what it reports: `--conversations even` is for choosing, `odd` (the default) for reporting.
Must never write the data anywhere: of it, `--vectors` keeps hashes and vectors only.
"""

import argparse
import asyncio
import hashlib
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ledger.context import open_share
from ledger.context_settings import ContextSettings
from ledger.embedder.client import EmbedderProcess
from ledger.embedder.process import packaged_model_id
from ledger.history import HistoryMessage, chunks_of
from ledger.packing import Prelude, pack
from ledger.ranking import Corpus, Query, Vectors, rank, rank_by_recency
from ledger.tokens import message_tokens
from ledger.words import counted_terms

CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
ANSWERABLE = "categories 1-4"
LOAD_TIMEOUT_S = EMBED_TIMEOUT_S = 300.0
TEXTS_A_CALL = 64
_DIALOGUE_ID = re.compile(r"D:?(\d+):0*(\d+)(?:\s*-\s*D?:?(?:\d+:)?0*(\d+))?")


@dataclass(frozen=True)
class Question:
    """An annotated question. `evidence` holds the ids of the messages with its answer."""

    text: str
    evidence: tuple[str, ...]
    category: str


@dataclass(frozen=True)
class Conversation:
    """One thread and what is asked about it."""

    name: str
    messages: list[HistoryMessage]
    questions: list[Question]


@dataclass(frozen=True)
class Design:
    """One way of choosing a context, named as the table shows it."""

    name: str
    settings: ContextSettings = field(default_factory=ContextSettings)
    recent_turns: int = 3
    is_by_recency: bool = False


@dataclass(frozen=True)
class Outcome:
    """What one design kept of one question's evidence."""

    design: str
    category: str
    budget: int
    recall: float


# What makes each part worth nothing.
OFF: dict[str, dict[str, float]] = {
    "semantic": {"semantic_weight": 0},
    "lexical": {"lexical_weight": 0},
    "passage": {"passage_weight": 0},
    "session": {"session_weight": 0},
    "session_best": {"session_best_weight": 0},
    "speaker": {"speaker_weight": 0},
    "date": {"date_weight": 0},
    "neighbours": {"neighbour_share": 0, "second_neighbour_share": 0},
    "length": {"length_weight": 0},
}


def designs() -> list[Design]:
    """Return what is compared: the shipped settings first."""
    nothing = {name: value for off in OFF.values() for name, value in off.items()}
    cosine = ContextSettings(**nothing | {"semantic_weight": 1, "recent_share": 1})
    bm25 = ContextSettings(**nothing | {"lexical_weight": 1})
    return [
        Design("as shipped"),
        *(Design(f"without {part}", ContextSettings(**off)) for part, off in OFF.items()),
        Design("last 3 + cosine", cosine),
        Design("BM25", bm25, recent_turns=0),
        Design("sliding window", recent_turns=0, is_by_recency=True),
    ]


def _evidence(raw: Iterable[Any]) -> list[str]:
    """Return canonical ids: the annotators wrote 'D8:6; D9:17', 'D30:05' and 'D12:3-D12:5'."""
    return [
        f"D{session}:{number}"
        for entry in raw
        for session, first, last in _DIALOGUE_ID.findall(str(entry))
        for number in range(int(first), int(last or first) + 1)
    ]


def _messages(sessions: Mapping[str, Any]) -> list[HistoryMessage]:
    messages: list[HistoryMessage] = []
    number = 1
    while f"session_{number}" in sessions:
        moment = datetime.strptime(sessions[f"session_{number}_date_time"], "%I:%M %p on %d %B, %Y")
        for said in sessions[f"session_{number}"]:
            caption = said.get("blip_caption") or ""
            caption = ", ".join(caption) if isinstance(caption, list) else caption
            content = (said["text"] + (f" [shares {caption}]" if caption else "")).strip()
            messages.append(
                HistoryMessage(
                    message_id=said["dia_id"],
                    turn_number=len(messages) + 1,
                    position=0,
                    role="user",
                    content=content,
                    at_ms=int(moment.replace(tzinfo=UTC).timestamp() * 1000),
                    tokens=message_tokens(content, said["speaker"]),
                    name=said["speaker"],
                )
            )
        number += 1
    return messages


def load(path: Path) -> list[Conversation]:
    """Read a file in LoCoMo's format; questions without evidence in the conversation are left out."""
    conversations = []
    for sample in json.loads(path.read_text(encoding="utf-8")):
        messages = _messages(sample["conversation"])
        known = {message.message_id for message in messages}
        questions = []
        for asked in sample["qa"]:
            evidence = tuple(each for each in dict.fromkeys(_evidence(asked.get("evidence", []))) if each in known)
            if evidence:
                questions.append(Question(asked["question"], evidence, CATEGORIES[asked["category"]]))
        conversations.append(Conversation(sample["sample_id"], messages, questions))
    return conversations


def _digest(model_id: str, text: str) -> str:
    return hashlib.sha256(f"{model_id}\n{text}".encode()).hexdigest()


async def _embed(texts: Sequence[str]) -> list[Vectors]:
    """Return each text's vector, float32[dimension], by the product's own embedder."""
    embedder = EmbedderProcess()
    await embedder.start()
    try:
        if not await embedder.wait_ready(LOAD_TIMEOUT_S):
            raise SystemExit("the embedding model did not load")
        rows: list[Vectors] = []
        for start in range(0, len(texts), TEXTS_A_CALL):
            rows.extend(await embedder.embed(list(texts[start : start + TEXTS_A_CALL]), timeout_s=EMBED_TIMEOUT_S))
        return rows
    finally:
        await embedder.close()


def vectors_of(texts: Iterable[str], kept_in: Path | None) -> dict[str, Vectors]:
    """Return the vector of each text; what the file `kept_in` holds is not made again, what it lacks is added."""
    digests = {text: _digest(packaged_model_id(), text) for text in texts}
    known: dict[str, Vectors] = {}
    if kept_in and kept_in.exists():
        with np.load(kept_in) as kept:
            known = dict(zip(kept["digests"].tolist(), kept["vectors"], strict=True))
    missing = sorted((text for text, digest in digests.items() if digest not in known), key=len)
    if missing:
        made = asyncio.run(_embed(missing))
        known |= {digests[text]: vector for text, vector in zip(missing, made, strict=True)}
        if kept_in:
            np.savez(kept_in, digests=np.array(list(known)), vectors=np.stack(list(known.values())))
    return {text: known[digest] for text, digest in digests.items()}


def corpus_of(conversation: Conversation, vectors: Mapping[str, Vectors]) -> Corpus:
    """Return the thread as the ledger would hold it when everything is indexed."""
    return Corpus(
        conversation.messages,
        {message.message_id: counted_terms(message.indexed_text) for message in conversation.messages},
        {
            message.message_id: np.stack([vectors[chunk] for chunk in chunks])
            for message in conversation.messages
            if (chunks := chunks_of(message))
        },
    )


def _folded(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().lower()


def _recall(question: Question, texts: Mapping[str, str], context: str) -> float:
    return statistics.fmean(texts[each] in context for each in question.evidence)


def measure(
    conversations: Sequence[Conversation],
    vectors: Mapping[str, Vectors],
    compared: Sequence[Design],
    budgets: Sequence[int],
) -> tuple[list[Outcome], dict[str, list[float]]]:
    """Build every context. Returns the outcomes, and the milliseconds of each ranking and packing."""
    outcomes: list[Outcome] = []
    spent_ms: dict[str, list[float]] = defaultdict(list)
    for conversation in conversations:
        corpus = corpus_of(conversation, vectors)
        texts = {message.message_id: _folded(message.content) for message in conversation.messages}
        for question in conversation.questions:
            for design in compared:
                started = time.perf_counter()
                query = Query.of(question.text, vectors[question.text][None, :])
                ranking = rank_by_recency(corpus) if design.is_by_recency else rank(corpus, query, design.settings)
                order = ranking.order()
                spent_ms["rank"].append(1000 * (time.perf_counter() - started))
                for budget in budgets:
                    share = open_share(budget).model_copy(update={"recent_turns": design.recent_turns})
                    started = time.perf_counter()
                    packed = pack(corpus.units, order, Prelude(), share, design.settings)
                    spent_ms["pack"].append(1000 * (time.perf_counter() - started))
                    if packed.tokens > budget:
                        raise AssertionError(f"{packed.tokens} tokens exceed the budget of {budget}")
                    context = _folded("\n".join(message.message.content for message in packed.messages))
                    recall = _recall(question, texts, context)
                    outcomes.append(Outcome(design.name, question.category, budget, recall))
    return outcomes, spent_ms


def tables(outcomes: Sequence[Outcome], compared: Sequence[Design], budgets: Sequence[int]) -> str:
    """Return one Markdown table for all answerable categories together and one for each category."""
    groups: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for outcome in outcomes:
        names = [outcome.category] + ([ANSWERABLE] if outcome.category != "adversarial" else [])
        for name in names:
            groups[name, outcome.design, outcome.budget].append(outcome.recall)
    lines = []
    present = {category for category, _, _ in groups}
    for category in (name for name in (ANSWERABLE, *CATEGORIES.values()) if name in present):
        count = len(groups[category, compared[0].name, budgets[0]])
        lines += [f"\n| {category} (n={count}) | " + " | ".join(map(str, budgets)) + " |"]
        lines += ["|---" * (len(budgets) + 1) + "|"]
        for design in compared:
            cells = []
            for budget in budgets:
                recalls = groups[category, design.name, budget]
                whole = statistics.fmean(recall == 1 for recall in recalls)
                cells.append(f"{100 * statistics.fmean(recalls):.1f} ({100 * whole:.1f})")
            lines.append(f"| {design.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def differences(outcomes: Sequence[Outcome], compared: Sequence[Design], budgets: Sequence[int]) -> str:
    """Return what each design lacks against the first, question by question, with 95 % of 1,000 resamplings."""
    recalls: dict[tuple[str, int], list[float]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.category != "adversarial":
            recalls[outcome.design, outcome.budget].append(outcome.recall)
    chance = np.random.default_rng(0)
    lines = [
        f"| points lost, {ANSWERABLE} | " + " | ".join(map(str, budgets)) + " |",
        "|---" * (len(budgets) + 1) + "|",
    ]
    for design in compared[1:]:
        cells = []
        for budget in budgets:
            lost = 100 * (np.array(recalls[compared[0].name, budget]) - np.array(recalls[design.name, budget]))
            means = [chance.choice(lost, len(lost)).mean() for _ in range(1000)]
            low, high = np.percentile(means, [2.5, 97.5])
            cells.append(f"{lost.mean():.1f} ({low:.1f} to {high:.1f})")
        lines.append(f"| {design.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="conversations in LoCoMo's format")
    parser.add_argument(
        "--conversations",
        choices=["even", "odd", "all"],
        default="odd",
        help="by place in the file, from 0: choose weights on even, report odd (default)",
    )
    parser.add_argument("--budgets", type=int, nargs="+", default=[500, 1000, 2000, 4000])
    parser.add_argument("--vectors", type=Path, help="a .npz file that keeps vectors between runs")
    parser.add_argument("--only", nargs="+", metavar="DESIGN", help="measure these designs and no others")
    chosen = parser.parse_args()
    everything = load(chosen.data)
    start, step = {"even": (0, 2), "odd": (1, 2), "all": (0, 1)}[chosen.conversations]
    conversations = everything[start::step]
    compared = [design for design in designs() if not chosen.only or design.name in chosen.only]
    if not conversations or not compared:
        raise SystemExit("nothing to measure: designs are " + ", ".join(design.name for design in designs()))
    texts = [chunk for each in conversations for message in each.messages for chunk in chunks_of(message)]
    texts += [question.text for each in conversations for question in each.questions]
    vectors = vectors_of(texts, chosen.vectors)
    outcomes, spent_ms = measure(conversations, vectors, compared, chosen.budgets)
    names = ", ".join(each.name for each in conversations)
    print(f"{chosen.conversations} conversations of {chosen.data.name}: {names}")
    print("evidence recall (questions with all evidence) in %, by token budget")
    print(tables(outcomes, compared, chosen.budgets))
    print("\n" + differences(outcomes, compared, chosen.budgets))
    for part, times in spent_ms.items():
        times.sort()
        print(f"\n{part}: p50 {statistics.median(times):.1f} ms, p95 {times[int(0.95 * len(times))]:.1f} ms")


if __name__ == "__main__":
    main()
