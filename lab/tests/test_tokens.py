"""Text becomes the same tokens however it is prepared, is verified when read, and gives each rank its windows."""

import hashlib
import os
from pathlib import Path

import pytest
import torch
from real import DATA
from texts import decode, write_text

from mvngrad_lab.store.lock import Locked
from mvngrad_lab.tasks.files import DamagedFile
from mvngrad_lab.tasks.language.data import prepare, text, tokens
from mvngrad_lab.tasks.language.data.prepare import write_tokens
from mvngrad_lab.tasks.language.data.text import Corpus
from mvngrad_lab.tasks.language.data.tokens import END_OF_TEXT, Manifest, Tokens, require_tokens, token_ids

WRITTEN = ("manifest.json", "train.bin", "validation.bin")

pytestmark = pytest.mark.usefixtures("no_data")


@pytest.fixture
def letters(letters, monkeypatch):
    """Tokens are bytes instead of GPT-2's, and pieces have a few documents."""
    monkeypatch.setattr(text, "PIECE_BYTES", 100)


@pytest.fixture
def vocabulary():
    """GPT-2's own."""
    pytest.importorskip("tiktoken", reason="needs tiktoken")
    if not (DATA / "gpt2_bpe").exists():
        pytest.skip("needs GPT-2's encoder.json and vocab.bpe")
    return DATA / "gpt2_bpe"


DOCUMENTS = [f"Document {n}\n\nof {'many ' * (n % 7)}words, and größer." for n in range(200)]


def corpus(*files, share=text.VALIDATION_SHARE, validation=(), source="test"):
    return Corpus(source, files, 0.0 if validation else share, validation)


def contents(folder):
    return {name: (folder / name).read_bytes() for name in WRITTEN}


# From documents to tokens


@pytest.mark.usefixtures("letters")
def test_every_document_is_in_one_split_in_its_order(tmp_path):
    path = write_text(tmp_path / "a.txt", *DOCUMENTS)
    manifest = write_tokens(corpus(path, share=0.2), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == list(WRITTEN)
    train, validation = decode(tmp_path / "out")
    assert [text for text in DOCUMENTS if text in set(train)] == train
    assert [text for text in DOCUMENTS if text in set(validation)] == validation
    assert sorted(train + validation) == sorted(DOCUMENTS)
    assert 20 < len(validation) < 60
    assert (manifest.train.documents, manifest.validation.documents) == (len(train), len(validation))
    assert manifest.files == (("a.txt", path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()),)


@pytest.mark.usefixtures("letters")
def test_held_out_documents_depend_on_their_content_alone(tmp_path):
    write_tokens(corpus(write_text(tmp_path / "a.txt", *DOCUMENTS), share=0.2), tmp_path / "a")
    backwards = write_text(tmp_path / "b.txt", *DOCUMENTS[:90:-1]), write_text(tmp_path / "c.txt", "new", "too")
    write_tokens(corpus(*backwards, share=0.2), tmp_path / "b")
    held = set(decode(tmp_path / "a")[1])
    assert {text for text in decode(tmp_path / "b")[1] if text in DOCUMENTS} == held & set(DOCUMENTS[91:])


@pytest.mark.usefixtures("letters")
def test_validation_files_are_used_whole(tmp_path):
    train, official = write_text(tmp_path / "a.txt", "one", "two"), write_text(tmp_path / "b.txt", "three")
    manifest = write_tokens(corpus(train, validation=(official,)), tmp_path / "out")
    assert decode(tmp_path / "out") == [["one", "two"], ["three"]]
    assert manifest.split == "validation: b.txt"
    write_tokens(corpus(official, share=1.0), tmp_path / "all")
    assert decode(tmp_path / "all") == [[], ["three"]]


@pytest.mark.usefixtures("letters")
def test_interrupted_preparation_is_resumed_with_the_same_result(tmp_path, monkeypatch):
    path = write_text(tmp_path / "a.txt", *DOCUMENTS[:100])
    write_tokens(corpus(path), tmp_path / "whole")
    made, write_shard = [], prepare._write_shard

    def stop_after_five(shard):
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append(shard)
        write_shard(shard)

    monkeypatch.setattr(prepare, "_write_shard", stop_after_five)
    with pytest.raises(KeyboardInterrupt):
        write_tokens(corpus(path), tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="not to the end"):
        Tokens.open(tmp_path / "out")
    # As if the process had died while it wrote the sixth, and the disk had lost the fifth's end and changed the fourth.
    (tmp_path / "out" / "shards" / "other.1.part").write_bytes(b"half")
    made[4].path.write_bytes(made[4].path.read_bytes()[:-2])
    content = bytearray(made[3].path.read_bytes())
    content[7] ^= 1
    made[3].path.write_bytes(content)
    again, seen = [], []
    monkeypatch.setattr(prepare, "_write_shard", lambda shard: (again.append(shard), write_shard(shard)))
    write_tokens(corpus(path), tmp_path / "out", on_progress=lambda done, total: seen.append((done, total)))
    assert not {shard.path for shard in again} & {shard.path for shard in made[:3]}
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    size = path.stat().st_size
    assert seen[0][0] > 0
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)


@pytest.mark.usefixtures("letters")
def test_a_second_process_is_refused_while_the_first_writes_tokens(tmp_path):
    documents, folder, refused = corpus(write_text(tmp_path / "a.txt", *DOCUMENTS)), tmp_path / "tokens", []

    def start_another(done, total):
        with pytest.raises(Locked, match=f"tokens is in use by process {os.getpid()} on this machine"):
            write_tokens(documents, folder)
        refused.append(done)

    manifest = write_tokens(documents, folder, on_progress=start_another)
    assert refused
    assert manifest == write_tokens(documents, folder) == Tokens.open(folder).manifest
    assert not (folder / "lock").exists()


@pytest.mark.usefixtures("letters")
def test_existing_tokens_are_kept_unless_something_differs(tmp_path, monkeypatch):
    path, out = write_text(tmp_path / "a.txt", *DOCUMENTS[:30]), tmp_path / "out"
    first = write_tokens(corpus(path), out)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_write_shard", None)
        assert write_tokens(corpus(path), out) == first
    content = bytearray((out / "train.bin").read_bytes())
    content[7] ^= 1
    (out / "train.bin").write_bytes(content)
    assert write_tokens(corpus(path), out) == first
    Tokens.open(out, checksum=True)
    assert write_tokens(corpus(path, share=0.5), out).validation.documents > first.validation.documents
    write_text(path, "other text")
    assert write_tokens(corpus(path), out).train.documents == 1


@pytest.mark.usefixtures("letters")
def test_source_becomes_verified_and_stays_so(tmp_path, monkeypatch):
    path, out = write_text(tmp_path / "a.txt", "one"), tmp_path / "out"
    write_tokens(corpus(path, source="text, not verified"), out)
    monkeypatch.setattr(prepare, "_write_shard", None)
    for source in ("text, sha256 verified", "text, not verified"):
        assert write_tokens(corpus(path, source=source), out).source == "text, sha256 verified"
        assert Manifest.read(out).source == "text, sha256 verified"


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize("content", [[], [" \n "]], ids=["empty", "blank"])
def test_text_without_training_documents_is_refused_and_existing_tokens_stay(tmp_path, content):
    path, out = write_text(tmp_path / "a.txt", "one"), tmp_path / "out"
    kept = write_tokens(corpus(path), out)
    write_text(path, *content)
    with pytest.raises(ValueError, match="has nothing to train on: its text is blank, or held out"):
        write_tokens(corpus(path, validation=(write_text(tmp_path / "b.txt", "two"),)), out)
    assert Manifest.read(out) == kept


@pytest.mark.usefixtures("letters")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_error_names_the_file(tmp_path, monkeypatch):
    path, out = write_text(tmp_path / "a.txt", "one"), tmp_path / "out"
    out.mkdir()
    (out / "train.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*train\.part"):
        write_tokens(corpus(path), out)

    def full(self, content):
        with Path("/dev/full").open("wb") as file:
            file.write(content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: .*shards.*\.part"):
        write_tokens(corpus(path), tmp_path / "other")


def test_number_of_workers_changes_nothing(tmp_path, vocabulary, monkeypatch):
    path = write_text(tmp_path / "a.txt", *DOCUMENTS)
    monkeypatch.setattr(text, "PIECE_BYTES", 1000)
    for folder, workers in (("alone", 1), ("together", 3)):
        write_tokens(corpus(path, share=0.1), tmp_path / folder, vocabulary, workers)
    assert contents(tmp_path / "together") == contents(tmp_path / "alone")


def test_tokens_are_gpt2s_and_decode_to_the_text(tmp_path, vocabulary):
    texts = ["Hello world", "It's 2026,\n\n  größer than 日本 <|endoftext|> inside"]
    write_tokens(corpus(write_text(tmp_path / "a.txt", *texts), share=0), tmp_path / "out", vocabulary)
    first, rest = token_ids(Tokens.open(tmp_path / "out").data).tensor_split([3])
    assert first.tolist() == [15496, 995, END_OF_TEXT]
    rest = rest.tolist()
    assert rest.count(END_OF_TEXT) == 1
    assert prepare.load_encoding(vocabulary).decode(rest) == texts[1] + "<|endoftext|>"


def test_altered_vocabulary_is_refused(tmp_path, vocabulary):
    for known in prepare.VOCABULARY:
        (tmp_path / known.name).write_bytes((vocabulary / known.name).read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedFile, match=r"encoder\.json"):
        prepare.load_encoding(tmp_path)


# Reading


@pytest.fixture
def folder(letters, tmp_path):
    """Tokens of two documents in tokens/mine."""
    folder = tmp_path / "tokens" / "mine"
    write_tokens(corpus(write_text(tmp_path / "a.txt", "abc", "defg"), share=0), folder)
    return folder


def test_damaged_tokens_are_not_read(folder):
    path = folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DamagedFile, match="has 16 bytes and not 18"):
        Tokens.open(folder)
    path.unlink()
    with pytest.raises(DamagedFile, match="has 0 bytes"):
        Tokens.open(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(DamagedFile, match="cannot be read"):
        Manifest.read(folder)


@pytest.mark.parametrize("times", ["new", "restored"])
def test_tokens_changed_in_place_are_not_read(folder, times):
    """Also if their size is the same and a tool restored their time of modification."""
    path = folder / "train.bin"
    status, content = path.stat(), path.read_bytes()
    Tokens.open(folder)
    path.write_bytes(b"\0" + content[1:])
    if times == "restored":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    for _ in range(2):
        with pytest.raises(DamagedFile, match=r"sha256 .* Delete its folder and prepare the text again"):
            Tokens.open(folder)
    path.write_bytes(content)
    assert len(Tokens.open(folder)) == 9


def test_sha256_is_computed_once_for_unchanged_tokens(folder, monkeypatch):
    hashed = []
    real = tokens.sha256
    monkeypatch.setattr(tokens, "sha256", lambda path: hashed.append(path.name) or real(path))
    for _ in range(3):
        Tokens.open(folder)
    assert hashed == ["train.bin"]
    (folder / "train.bin").touch()
    Tokens.open(folder)
    assert len(hashed) == 2
    Tokens.open(folder, checksum=True)
    assert len(hashed) == 3
    (folder / "train.verified").unlink()
    monkeypatch.setattr(tokens, "write_atomic", _refuse_to_write)
    for _ in range(2):
        Tokens.open(folder)
    assert len(hashed) == 5, "verified each time in a folder that cannot be written to"


def _refuse_to_write(path, text):
    raise PermissionError(13, "Permission denied", str(path))


def test_missing_tokens_are_an_error_with_the_prepared_texts(folder, tmp_path):
    (tmp_path / "tokens" / ".trash").mkdir()
    there = r"Prepared are: mine$"
    with pytest.raises(FileNotFoundError, match=rf"text='other' .*; `mvngrad data prepare FOLDER` .*{there}") as caught:
        require_tokens("other", tmp_path)
    assert "data get" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match=rf"; `mvngrad data get wikitext103` prepares it\. {there}"):
        require_tokens("wikitext103", tmp_path)


# The windows of a step


def test_window_starts_are_uniform_reach_both_ends_and_differ_by_seed_and_step():
    drawn = torch.stack([tokens.window_starts(0, step, 100, context=4, tokens=14) for step in range(100)])
    counts = torch.bincount(drawn.flatten(), minlength=10)
    assert len(counts) == 10
    assert ((counts - 1000).abs() < 5 * 1000**0.5).all()
    first = tokens.window_starts(0, 0, 50, 4, 10**9)
    assert torch.equal(first, tokens.window_starts(0, 0, 50, 4, 10**9))
    for other in (tokens.window_starts(1, 0, 50, 4, 10**9), tokens.window_starts(0, 1, 50, 4, 10**9)):
        assert not torch.isin(first, other).any()
    assert tokens.window_starts(0, 0, 3, context=4, tokens=5).tolist() == [0, 0, 0]
