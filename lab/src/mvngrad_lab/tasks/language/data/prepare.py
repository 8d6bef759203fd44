"""Prepare text for training: tokenize it once with GPT-2's byte pair encoding, into a folder that `tokens` reads."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvngrad.diagnostics.records import add_checksum, pop_checksum
from mvngrad_lab import pool
from mvngrad_lab.errors import InvalidInput, NotPossible
from mvngrad_lab.store import write_atomic
from mvngrad_lab.store.lock import lock_folder
from mvngrad_lab.tasks import files
from mvngrad_lab.tasks.files import KnownFile, OnProgress, name_full_disk
from mvngrad_lab.tasks.language.data import text as texts
from mvngrad_lab.tasks.language.data.text import Corpus, Piece, read_documents
from mvngrad_lab.tasks.language.data.tokens import END_OF_TEXT, MANIFEST, SPLITS, Manifest, Part, Tokens, find_tokens

if TYPE_CHECKING:
    from tiktoken import Encoding

VOCABULARY = (
    KnownFile("encoder.json", 1042301, "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
    KnownFile("vocab.bpe", 456318, "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
)
"""As OpenAI published them; tiktoken expects the same checksums."""
PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's words: no token spans two of them."""
TOKENIZER = f"gpt2, vocab.bpe sha256 {VOCABULARY[1].sha256}"


def prepare_tokens(
    name: str,
    data: Path | None = None,
    *,
    workers: int | None = None,
    on_progress: OnProgress = lambda done, total: None,
    on_download: OnProgress | None = None,
) -> Path:
    """Tokenize wikitext103, openwebtext, wikipedia_en or wikitext103-validation; returns the folder with the tokens.

    Downloads the text if it is missing and can be downloaded. Existing tokens are verified and kept, also if their text
    is gone. The folder `data` has the text, gets tokens/`name`, and may have gpt2_bpe, GPT-2's vocabulary. As many
    `workers` tokenize as there are cores. `on_progress` and `on_download` are called with the bytes done, and with all.
    """
    if name in texts.ARCHIVES:
        files.data_folder(data).mkdir(parents=True, exist_ok=True)
    try:
        corpus = texts.find_corpus(name, data)
    except FileNotFoundError:
        if (folder := find_tokens(name, data)) is not None:
            for split in SPLITS:
                Tokens.open(folder, split, checksum=True)
            return folder
        if name not in texts.ARCHIVES:
            raise
        corpus = texts.find_corpus(name, texts.download_text(name, data, on_download))
    return _prepare_corpus(corpus, name, data, workers, on_progress)


def prepare_folder_tokens(
    folder: Path,
    data: Path | None = None,
    *,
    workers: int | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> tuple[str, Path]:
    """Tokenize all .txt files of a folder; returns the name for a recipe's `text` and the folder with the tokens.

    The name ends in a hash of the text, the split and the tokenizer, so that two runs with the same `text` saw the same
    tokens. The other arguments are those of `prepare_tokens`.
    Raises InvalidInput, before anything is tokenized, if a split would be empty.
    """
    corpus = texts.folder_corpus(folder)
    _check_splits(corpus, folder, check_validation=True)
    files.data_folder(data).mkdir(parents=True, exist_ok=True)
    held_out = list(map(files.sha256, corpus.validation)) or corpus.share
    content = json.dumps([TOKENIZER, list(map(files.sha256, corpus.files)), held_out])
    prefix = re.sub(r"[^A-Za-z0-9_]+", "-", folder.resolve().name).strip("-") or "text"
    name = f"{prefix}-{_hash(content)[:12]}"
    return name, _prepare_corpus(corpus, name, data, workers, on_progress)


def _prepare_corpus(corpus: Corpus, name: str, data: Path | None, workers: int | None, on_progress: OnProgress) -> Path:
    folder = find_tokens(name, data) or files.data_folder(data) / "tokens" / name
    vocabulary = data if data is not None and (data / "gpt2_bpe").is_dir() else None
    write_tokens(corpus, folder, vocabulary, pool.count_cores() if workers is None else workers, on_progress)
    return folder


def _check_splits(corpus: Corpus, folder: Path, check_validation: bool) -> None:
    """Raise InvalidInput if a split would be empty. Reads documents only until that is known."""
    splits = {True} if not check_validation or any(read_documents(*corpus.validation)) else set()
    if corpus.share == 1:
        splits.add(False)  # all of it is for validation
    for text in read_documents(*corpus.files):
        if len(splits) == 2:
            break
        splits.add(is_for_validation(text, corpus.share))
    if False not in splits:
        raise InvalidInput(f"{folder} has nothing to train on: its text is blank, or held out; put text there")
    if True not in splits:
        none = f"none of its documents is among the {corpus.share:.1%} that are held out"
        reason = f"{texts.VALIDATION_FILE} is blank" if corpus.validation else none
        raise InvalidInput(
            f"{folder} has nothing to validate on: {reason}; put some of its text into {folder / texts.VALIDATION_FILE}"
        )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def is_for_validation(document: str, share: float) -> bool:
    """Whether the sha256 of a document, read as a fraction from 0 to below 1, is below the share."""
    return int(_hash(document)[:12], 16) / 2**48 < share


# From text to tokens


@dataclass(frozen=True)
class Shard:
    """A piece of text and the file for its tokens: first those for training, then those for validation."""

    piece: Piece
    share: float
    """The share of its documents used for validation."""
    path: Path

    @property
    def note(self) -> Path:
        """Written last: documents and tokens of each split, and the sha256 of the file."""
        return self.path.with_suffix(".json")

    def read_counts(self) -> dict[str, list[int]] | None:
        """Documents and tokens of each split; None if the shard is not finished, or damaged."""
        try:
            note = json.loads(self.note.read_text(encoding="utf-8"))
            whole = pop_checksum(note) and note["sha256"] == files.sha256(self.path)
            return {split: note[split] for split in SPLITS} if whole else None
        except (OSError, ValueError, LookupError, TypeError):
            return None


def write_tokens(
    corpus: Corpus,
    folder: Path,
    vocabulary: Path | None = None,
    workers: int = 1,
    on_progress: OnProgress = lambda done, total: None,
) -> Manifest:
    """Write train.bin, validation.bin and manifest.json of a corpus into `folder`; tokens of the same text are kept.

    The result does not depend on the number of workers. A process that dies leaves whole shards, and the next one makes
    the others. The files get their names when all shards are done, the manifest last; while shards are joined, twice
    the space is needed. A document is held out for validation by its content alone: the order of documents does not
    matter, and of two equal documents none is trained on.
    Raises InvalidInput, before anything is written, if nothing is left to train on though not all is for validation;
    Locked if another process writes these tokens.
    """
    paths = (*corpus.files, *corpus.validation)
    sources = tuple((path.name, path.stat().st_size, files.sha256(path)) for path in paths)
    names = ", ".join(path.name for path in corpus.validation)
    rule = f"validation: {names or f'documents whose sha256 begins, as a fraction, below {corpus.share}'}"
    if (manifest := _existing_manifest(folder, corpus.source, rule, sources)) is not None:
        return manifest
    _check_splits(corpus, corpus.files[0].parent, check_validation=False)
    with lock_folder(folder):
        manifest = _existing_manifest(folder, corpus.source, rule, sources)  # written just now, by another process
        return manifest or _tokenize(corpus, folder, sources, rule, vocabulary, workers, on_progress)


def _tokenize(
    corpus: Corpus,
    folder: Path,
    sources: tuple[tuple[str, int, str], ...],
    rule: str,
    vocabulary: Path | None,
    workers: int,
    on_progress: OnProgress,
) -> Manifest:
    paths = (*corpus.files, *corpus.validation)
    (folder / MANIFEST).unlink(missing_ok=True)
    shards_at = folder / "shards"
    shards_at.mkdir(parents=True, exist_ok=True)
    shares = [corpus.share] * len(corpus.files) + [1.0] * len(corpus.validation)
    shards = [
        Shard(piece, part, shards_at / f"{_hash(f'{TOKENIZER} {digest} {piece.start} {piece.stop} {part}')[:24]}.bin")
        for path, part, (_, _, digest) in zip(paths, shares, sources, strict=True)
        for piece in texts.split_file(path)
    ]
    missing = [shard for shard in shards if shard.read_counts() is None]
    total = sum(shard.piece.size for shard in shards)
    done = total - sum(shard.piece.size for shard in missing)
    on_progress(done, total)
    if missing:
        load_encoding(vocabulary)  # fails here once, rather than in each worker
        for shard, _ in pool.run_jobs(_write_shard, missing, workers, _start_worker, vocabulary):
            done += shard.piece.size
            on_progress(done, total)
    manifest = Manifest(corpus.source, TOKENIZER, rule, sources, *(_join(shards, split, folder) for split in SPLITS))
    manifest.write(folder)
    shutil.rmtree(shards_at)
    return manifest


def _existing_manifest(
    folder: Path, source: str, rule: str, sources: tuple[tuple[str, int, str], ...]
) -> Manifest | None:
    """The manifest of a folder that has exactly these tokens, verified.

    A `source` that says the text was verified is kept if its archive is gone: the sha256 of the text is the same.
    """
    try:
        manifest, _ = (Tokens.open(folder, split, checksum=True).manifest for split in SPLITS)
    except (OSError, ValueError):
        return None
    if (manifest.tokenizer, manifest.split, manifest.files) != (TOKENIZER, rule, sources):
        return None
    if manifest.source != source and not manifest.source.endswith(texts.VERIFIED):
        manifest = replace(manifest, source=source)
        manifest.write(folder)
    return manifest


_encoding: Any = None
"""In a worker, the encoding, loaded once."""


def _start_worker(vocabulary: Path | None) -> None:
    global _encoding
    _encoding = load_encoding(vocabulary)


def _write_shard(shard: Shard) -> None:
    tokens = {split: array("H") for split in SPLITS}
    documents = dict.fromkeys(SPLITS, 0)
    for text in texts.read_piece(shard.piece):
        split = SPLITS[is_for_validation(text, shard.share)]
        documents[split] += 1
        tokens[split].extend(_encoding.encode_ordinary(text))
        tokens[split].append(END_OF_TEXT)
    partial = shard.path.with_suffix(f".{os.getpid()}.part")
    with name_full_disk(partial):
        partial.write_bytes(content := b"".join(tokens[split].tobytes() for split in SPLITS))
    partial.replace(shard.path)
    counts = {split: [documents[split], len(tokens[split])] for split in SPLITS}
    write_atomic(shard.note, json.dumps(add_checksum({**counts, "sha256": hashlib.sha256(content).hexdigest()})))


def _join(shards: Sequence[Shard], split: str, folder: Path) -> Part:
    """Write the tokens of all shards that belong to a split into one file, in the order of the text."""
    target = folder / f"{split}.bin"
    partial = target.with_suffix(".part")
    digest, documents, tokens = hashlib.sha256(), 0, 0
    with name_full_disk(partial), partial.open("wb") as out:
        for shard in shards:
            if (counts := shard.read_counts()) is None:
                raise NotPossible(f"{shard.path} was changed while {target} was written; start again")
            content, middle = shard.path.read_bytes(), 2 * counts["train"][1]
            content = content[:middle] if split == "train" else content[middle:]
            out.write(content)
            digest.update(content)
            documents, tokens = documents + counts[split][0], tokens + counts[split][1]
        out.flush()
        os.fsync(out.fileno())
    partial.replace(target)
    return Part(tokens, documents, digest.hexdigest())


def load_encoding(vocabulary: Path | None = None) -> Encoding:
    """GPT-2's encoding from encoder.json and vocab.bpe in the folder `vocabulary` or its subfolder gpt2_bpe, by default
    in that of MVNGRAD_DATA or the cache; otherwise downloaded by tiktoken.
    """
    try:
        import tiktoken
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    except ImportError as error:
        raise NotPossible("preparing text needs tiktoken: pip install mvngrad-lab") from error
    paths = files.find_files("gpt2_bpe", VOCABULARY, vocabulary)
    if paths is None:
        try:
            return tiktoken.get_encoding("gpt2")
        except OSError as error:
            raise NotPossible(
                f"GPT-2's vocabulary cannot be downloaded ({type(error).__name__}); put "
                f"{' and '.join(file.name for file in VOCABULARY)} into gpt2_bpe/ of the folder of data"
            ) from error
    for path, known in zip(paths, VOCABULARY, strict=True):
        files.verify(path, known)
    encoder, merges = map(str, paths)
    ranks = data_gym_to_mergeable_bpe_ranks(merges, encoder, VOCABULARY[1].sha256, VOCABULARY[0].sha256)
    return tiktoken.Encoding(
        "gpt2",
        explicit_n_vocab=END_OF_TEXT + 1,
        pat_str=PATTERN,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": END_OF_TEXT},
    )
