"""Text becomes the same tokens however it is prepared, is verified when read, and gives each rank its windows."""

import dataclasses
import hashlib
import io
import json
import lzma
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from real import DATA

from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.tasks.files import DamagedFile, KnownFile
from mvngrad_lab.tasks.language.data import prepare, text, tokens
from mvngrad_lab.tasks.language.data.prepare import prepare_folder_tokens, prepare_tokens, write_tokens
from mvngrad_lab.tasks.language.data.text import Corpus, download_text, find_corpus, folder_corpus, read_documents
from mvngrad_lab.tasks.language.data.tokens import (
    END_OF_TEXT,
    Manifest,
    Tokens,
    rank_slice,
    read_windows,
    require_tokens,
    token_ids,
    window_starts,
)
from mvngrad_lab.tasks.language.recipe import wikitext103

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


def document(number):
    return f"Document {number}\n\nof {'many ' * (number % 7)}words, and größer."


DOCUMENTS = [document(number) for number in range(200)]


def write(path, *documents):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("\n<|endoftext|>\n".join(documents).encode())
    return path


def corpus(*files, validation=text.VALIDATION_SHARE, source="test"):
    return Corpus(source, files, validation)


def contents(folder):
    return {name: (folder / name).read_bytes() for name in WRITTEN}


def decode(folder, split):
    """The documents of a split that was prepared by bytes."""
    documents, current = [], bytearray()
    for number in token_ids(Tokens.open(folder, split).data).tolist():
        if number == END_OF_TEXT:
            documents.append(current.decode())
            current.clear()
        else:
            current.append(number)
    assert not current
    return documents


# From documents to tokens


@pytest.mark.usefixtures("letters")
def test_every_document_is_in_one_split_in_its_order(tmp_path):
    path = write(tmp_path / "a.txt", *DOCUMENTS)
    manifest = write_tokens(corpus(path, validation=0.2), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == list(WRITTEN)
    train, validation = decode(tmp_path / "out", "train"), decode(tmp_path / "out", "validation")
    assert [text for text in DOCUMENTS if text in set(train)] == train
    assert [text for text in DOCUMENTS if text in set(validation)] == validation
    assert sorted(train + validation) == sorted(DOCUMENTS)
    assert 20 < len(validation) < 60
    assert (manifest.train.documents, manifest.validation.documents) == (len(train), len(validation))
    assert manifest.files == (("a.txt", path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()),)


@pytest.mark.usefixtures("letters")
def test_held_out_documents_depend_on_their_content_alone(tmp_path):
    write_tokens(corpus(write(tmp_path / "a.txt", *DOCUMENTS), validation=0.2), tmp_path / "a")
    backwards = write(tmp_path / "b.txt", *DOCUMENTS[:90:-1]), write(tmp_path / "c.txt", "new", "too")
    write_tokens(corpus(*backwards, validation=0.2), tmp_path / "b")
    held = set(decode(tmp_path / "a", "validation"))
    assert {text for text in decode(tmp_path / "b", "validation") if text in DOCUMENTS} == held & set(DOCUMENTS[91:])


@pytest.mark.usefixtures("letters")
def test_validation_files_are_used_whole(tmp_path):
    train, official = write(tmp_path / "a.txt", "one", "two"), write(tmp_path / "b.txt", "three")
    manifest = write_tokens(corpus(train, validation=(official,)), tmp_path / "out")
    assert [decode(tmp_path / "out", split) for split in tokens.SPLITS] == [["one", "two"], ["three"]]
    assert manifest.split == "validation: b.txt"
    write_tokens(corpus(official, validation=1.0), tmp_path / "all")
    assert [decode(tmp_path / "all", split) for split in tokens.SPLITS] == [[], ["three"]]


@pytest.mark.usefixtures("letters")
def test_interrupted_preparation_is_resumed_with_the_same_result(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", *DOCUMENTS[:100])
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
    # As if the process had died while it wrote the sixth, and the disk had lost half of the fifth.
    (tmp_path / "out" / "shards" / "other.1.part").write_bytes(b"half")
    made[4].path.write_bytes(made[4].path.read_bytes()[:-2])
    again, seen = [], []
    monkeypatch.setattr(prepare, "_write_shard", lambda shard: (again.append(shard), write_shard(shard)))
    write_tokens(corpus(path), tmp_path / "out", on_progress=lambda done, total: seen.append((done, total)))
    assert not {shard.path for shard in again} & {shard.path for shard in made[:4]}
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    size = path.stat().st_size
    assert seen[0][0] > 0
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)


@pytest.mark.usefixtures("letters")
def test_existing_tokens_are_kept_unless_something_differs(tmp_path, monkeypatch):
    path, out = write(tmp_path / "a.txt", *DOCUMENTS[:30]), tmp_path / "out"
    first = write_tokens(corpus(path), out)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_write_shard", None)
        assert write_tokens(corpus(path), out) == first
    content = bytearray((out / "train.bin").read_bytes())
    content[7] ^= 1
    (out / "train.bin").write_bytes(content)
    assert write_tokens(corpus(path), out) == first
    Tokens.open(out, checksum=True)
    assert write_tokens(corpus(path, validation=0.5), out).validation.documents > first.validation.documents
    write(path, "other text")
    assert write_tokens(corpus(path), out).train.documents == 1


@pytest.mark.usefixtures("letters")
def test_source_becomes_verified_and_stays_so(tmp_path, monkeypatch):
    path, out = write(tmp_path / "a.txt", "one"), tmp_path / "out"
    write_tokens(corpus(path, source="text, not verified"), out)
    monkeypatch.setattr(prepare, "_write_shard", None)
    for source in ("text, sha256 verified", "text, not verified"):
        assert write_tokens(corpus(path, source=source), out).source == "text, sha256 verified"
        assert Manifest.read(out).source == "text, sha256 verified"


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize("content", [[], [" \n "]], ids=["empty", "blank"])
def test_text_without_training_documents_is_refused_and_existing_tokens_stay(tmp_path, content):
    path, out = write(tmp_path / "a.txt", "one"), tmp_path / "out"
    kept = write_tokens(corpus(path), out)
    write(path, *content)
    with pytest.raises(ValueError, match="has nothing to train on: its text is blank, or held out"):
        write_tokens(corpus(path, validation=(write(tmp_path / "b.txt", "two"),)), out)
    assert Manifest.read(out) == kept


@pytest.mark.usefixtures("letters")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_error_names_the_file(tmp_path, monkeypatch):
    path, out = write(tmp_path / "a.txt", "one"), tmp_path / "out"
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
    path = write(tmp_path / "a.txt", *DOCUMENTS)
    monkeypatch.setattr(text, "PIECE_BYTES", 1000)
    for folder, workers in (("alone", 1), ("together", 3)):
        write_tokens(corpus(path, validation=0.1), tmp_path / folder, vocabulary, workers)
    assert contents(tmp_path / "together") == contents(tmp_path / "alone")


def test_tokens_are_gpt2s_and_decode_to_the_text(tmp_path, vocabulary):
    texts = ["Hello world", "It's 2026,\n\n  größer than 日本 <|endoftext|> inside"]
    write_tokens(corpus(write(tmp_path / "a.txt", *texts), validation=0), tmp_path / "out", vocabulary)
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


@pytest.mark.parametrize(
    ("files", "validation", "message"),
    [(("a.txt",), 1.5, r"validation=1\.5 is not a share"), ((), 0.1, "files is empty")],
)
def test_invalid_corpus_is_refused_by_argument(files, validation, message):
    with pytest.raises(ValueError, match=message):
        corpus(*files, validation=validation)


# From files to documents


@pytest.mark.parametrize("size", [1, 7, 30, 10**6])
def test_pieces_of_any_size_have_the_same_documents(tmp_path, monkeypatch, size):
    monkeypatch.setattr(text, "PIECE_BYTES", size)
    path = tmp_path / "a.txt"
    path.write_bytes(
        b"<|endoftext|>\none\n<|endoftext|>\n<|endoftext|>\r\ntwo <|endoftext|> lines\n\n\n<|endoftext|>\n "
    )
    assert list(read_documents(path)) == ["one", "two <|endoftext|> lines\n\n"]
    path.write_bytes(b"")
    assert list(read_documents(path)) == []


def test_wikitext_articles_begin_with_their_headings(tmp_path):
    articles = [" = One = \n \n text \n = 1 henry = \n \n = = Part = = \n \n", " = Two ( film ) = \n \n more \n"]
    path = tmp_path / "wiki.train.tokens"
    path.write_text(" \n" + articles[0] + " \n" + articles[1])
    assert list(read_documents(path)) == [" \n" + articles[0] + " \n", articles[1]]


@pytest.mark.skipif(not DATA.exists(), reason="needs WikiText-103's validation text")
@pytest.mark.parametrize("part", ["valid", "test"])
def test_wikitext103_has_sixty_articles_in_each_text(tmp_path, part):
    content = lzma.decompress((DATA / "wikitext103" / f"wiki.{part}.tokens.xz").read_bytes())
    path = tmp_path / f"wiki.{part}.tokens"
    path.write_bytes(content)
    documents = list(read_documents(path))
    assert "".join(documents).encode() == content
    assert len(documents) == 60


def archive(members):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def openwebtext(*subsets):
    packed = {f"openwebtext/urlsf_subset00-{i}_data.xz": lzma.compress(archive(each)) for i, each in enumerate(subsets)}
    return archive(packed)


def test_openwebtext_is_read_from_the_archives_in_its_archive(tmp_path):
    path = tmp_path / "openwebtext.tar"
    path.write_bytes(openwebtext({"1.txt": b"one\n\n\n\nmore\n", "2.txt": b" \n"}, {"3.txt": "zwölf".encode()}))
    assert len(text.split_file(path)) == 2
    assert list(read_documents(path)) == ["one\n\nmore", "zwölf"]
    path.write_bytes(lzma.compress(path.read_bytes()))
    with pytest.raises(ValueError, match="not a plain tar archive"):
        text.split_file(path)


def test_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"gr\xf6\xdfer")
    with pytest.raises(ValueError, match=r"a\.txt, in bytes 0 to 6: not UTF-8"):
        list(read_documents(path))
    with pytest.raises(ValueError, match=r"a\.pdf is no text by its name"):
        text.split_file(tmp_path / "a.pdf")


# Where text comes from

VALID = b" \n = valid = \n \n words \n"


@pytest.fixture
def published(mirror, monkeypatch):
    """A mirror with small archives in place of the published ones."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for part in ("train", "valid", "test"):
            archive.writestr(f"wikitext-103/wiki.{part}.tokens", VALID.replace(b"valid", part.encode()))
    contents = {
        "wikitext103": packed.getvalue(),
        "openwebtext": lzma.compress(openwebtext({"1.txt": b"one"}, {"2.txt": b"two"})),
    }
    for name, content in contents.items():
        known = KnownFile(text.ARCHIVES[name].name, len(content), hashlib.sha256(content).hexdigest())
        monkeypatch.setitem(text.ARCHIVES, name, known)
        monkeypatch.setitem(text.MIRRORS, name, (f"{mirror.url}/{known.name}",))
        mirror.files[f"/{known.name}"] = content
    known = KnownFile("wiki.valid.tokens", len(VALID), hashlib.sha256(VALID).hexdigest())
    monkeypatch.setattr(text, "WIKITEXT103_VALIDATION", known)
    return mirror


each_archive = pytest.mark.parametrize("name", ["wikitext103", "openwebtext"])


@each_archive
@pytest.mark.usefixtures("letters")
def test_published_text_is_downloaded_once_verified_and_prepared(tmp_path, monkeypatch, published, name):
    with pytest.raises(FileNotFoundError, match=f"mvngrad data get {name}"):
        find_corpus(name)
    reports = []
    folder = prepare_tokens(name, tmp_path, workers=1, on_download=lambda *counts: reports.append(counts))
    assert folder == tmp_path / "tokens" / name
    assert reports[-1] == (text.ARCHIVES[name].size,) * 2
    assert decode(folder, "train") == ([VALID.decode().replace("valid", "train")] if "wiki" in name else ["one", "two"])
    assert download_text(name, tmp_path) == tmp_path
    assert len(published.requests) == 1
    archive = tmp_path / name / text.ARCHIVES[name].name
    archive.write_bytes(archive.read_bytes()[:-1])
    with pytest.raises(DamagedFile, match="download it again"):
        download_text(name, tmp_path)
    monkeypatch.setenv("MVNGRAD_DATA", str(tmp_path / "variable"))
    assert prepare_tokens(name, workers=1) == tmp_path / "variable" / "tokens" / name


@each_archive
@pytest.mark.usefixtures("published")
def test_only_text_equal_to_its_archive_is_called_verified(tmp_path, name):
    download_text(name, tmp_path)
    known = text.ARCHIVES[name]
    archive, path = tmp_path / name / known.name, find_corpus(name, tmp_path).files[0]
    assert find_corpus(name, tmp_path).source.endswith("training text as published, sha256 verified")
    content = path.read_bytes()
    for other in (content + b"x", content[:-1], b"x" + content[1:]):
        path.write_bytes(other)
        with pytest.raises(DamagedFile, match=rf"{path.name} is not what .*{known.name} holds; delete it"):
            find_corpus(name, tmp_path)
    archive.rename(tmp_path / known.name)  # outside the folder of its name
    with pytest.raises(DamagedFile, match="is not what"):
        find_corpus(name, tmp_path)
    (tmp_path / known.name).write_bytes(b"another archive")
    with pytest.raises(DamagedFile, match=f"is not {known.name} as published"):
        find_corpus(name, tmp_path)
    (tmp_path / known.name).unlink()
    assert find_corpus(name, tmp_path).source.endswith("training text not verified")


@pytest.mark.usefixtures("published")
def test_subsets_of_openwebtext_are_not_called_verified(tmp_path):
    download_text("openwebtext", tmp_path)
    (tmp_path / "openwebtext" / "openwebtext.tar").rename(tmp_path / "openwebtext" / "urlsf_subset00.tar")
    source = "OpenWebText, 1 of its 21 subsets, training text not verified"
    assert find_corpus("openwebtext", tmp_path).source == source


@each_archive
@pytest.mark.usefixtures("letters")
def test_archive_outside_the_folder_of_its_name_is_used(tmp_path, published, name):
    download_text(name, tmp_path / "first")
    known = text.ARCHIVES[name]
    (tmp_path / "first" / name / known.name).rename(tmp_path / known.name)
    folder = prepare_tokens(name, tmp_path, workers=1)
    assert len(published.requests) == 1
    assert Manifest.read(folder).source.endswith("sha256 verified")


@pytest.mark.usefixtures("letters")
def test_validation_text_of_wikitext103_alone(tmp_path, monkeypatch):
    path = write(tmp_path / "wikitext103" / "wiki.valid.tokens", VALID.decode())
    with pytest.raises(DamagedFile, match=r"is not wiki\.valid\.tokens as published"):
        prepare_tokens("wikitext103-validation", tmp_path, workers=1)
    known = KnownFile(path.name, len(VALID), hashlib.sha256(VALID).hexdigest())
    monkeypatch.setattr(text, "WIKITEXT103_VALIDATION", known)
    folder = prepare_tokens("wikitext103-validation", tmp_path, workers=1)
    assert folder == tmp_path / "tokens" / "wikitext103-validation"
    assert [decode(folder, split) for split in tokens.SPLITS] == [[], [VALID.decode()]]


@pytest.mark.usefixtures("letters")
def test_text_is_prepared_once_and_tokens_outlive_it(tmp_path, monkeypatch):
    home, seen = tmp_path / "home", []
    path = write(home / "wikipedia_en" / "wikipedia_en.0.txt", "one", "two")
    folder = prepare_tokens("wikipedia_en", home, workers=1, on_progress=lambda *counts: seen.append(counts))
    assert folder == home / "tokens" / "wikipedia_en" == require_tokens("wikipedia_en", home)
    assert decode(folder, "train") == ["one", "two"]
    assert "stand-in" in Manifest.read(folder).source
    assert seen[-1] == (path.stat().st_size,) * 2
    monkeypatch.setattr(prepare, "_write_shard", None)
    assert prepare_tokens("wikipedia_en", home, workers=1) == folder
    path.unlink()
    assert prepare_tokens("wikipedia_en", home, workers=1) == folder
    (folder / "train.bin").write_bytes(b"\0" * (folder / "train.bin").stat().st_size)
    with pytest.raises(DamagedFile, match=r"sha256 .* Delete its folder"):
        prepare_tokens("wikipedia_en", home, workers=1)


def test_unknown_or_missing_text_and_a_file_in_place_of_the_folder_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"wikipedia_en is not in .*; name a folder that has it"):
        prepare_tokens("wikipedia_en", tmp_path)
    with pytest.raises(ValueError, match="name='c4' is no known text"):
        prepare_tokens("c4", tmp_path)
    (tmp_path / "file").touch()
    mine = write(tmp_path / "mine" / "a.txt", "one").parent
    write(mine / "validation.txt", "two")
    for make, given in ((prepare_tokens, "wikitext103"), (prepare_folder_tokens, mine)):
        with pytest.raises(InvalidInput, match=r"file', given as --data or folder, is not a folder; name one"):
            make(given, tmp_path / "file")


# A folder of one's own


def test_folder_is_read_in_the_order_of_its_names(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt", "d.md"):
        write(tmp_path / "mine" / name, name)
    corpus = folder_corpus(tmp_path / "mine")
    assert [path.name for path in corpus.files] == ["a.txt", "b.txt", "c.txt"]
    assert corpus.source == "text of the folder mine"
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no \.txt files"):
        folder_corpus(tmp_path / "empty")


@pytest.mark.usefixtures("letters")
def test_folder_is_named_by_its_content(tmp_path):
    mine, home = tmp_path / "My texts", tmp_path / "home"
    write(mine / "a.txt", "one", "two")
    write(mine / "validation.txt", "three")
    name, folder = prepare_folder_tokens(mine, home, workers=1)
    assert name.startswith("My-texts-")
    assert folder == home / "tokens" / name == require_tokens(name, home)
    assert dataclasses.replace(wikitext103("adam"), text=name).text == name
    assert [decode(folder, split) for split in tokens.SPLITS] == [["one", "two"], ["three"]]
    (mine / "a.txt").rename(mine / "b.txt")
    assert prepare_folder_tokens(mine, home, workers=1) == (name, folder)
    write(mine / "validation.txt", "four")
    other, _ = prepare_folder_tokens(mine, home, workers=1)
    (mine / "validation.txt").unlink()
    write(mine / "b.txt", "one", "page 1016")  # whose sha256 begins below 0.5%
    third, place = prepare_folder_tokens(mine, home, workers=1)
    assert [decode(place, split) for split in tokens.SPLITS] == [["one"], ["page 1016"]]
    assert len({name, other, third}) == 3
    assert json.loads((folder / "manifest.json").read_text())["validation"]["tokens"] == 6


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a": "one", "b": "two"},
            r"nothing to validate on: none of its documents is among the 0\.5% .*validation\.txt",
        ),
        ({"a": "one", "validation": " \n"}, r"nothing to validate on: validation\.txt is blank; put .*validation\.txt"),
        ({"a": "page 1016"}, "mine has nothing to train on: its text is blank, or held out"),
        ({"a": "\n", "validation": "two"}, "nothing to train on"),
    ],
    ids=["few", "blank validation", "all held out", "blank"],
)
def test_folder_with_an_empty_split_is_refused_before_it_is_tokenized(tmp_path, monkeypatch, files, message):
    for name, content in files.items():
        write(tmp_path / "mine" / f"{name}.txt", content)
    monkeypatch.setattr(prepare, "_write_shard", None)
    with pytest.raises(ValueError, match=message):
        prepare_folder_tokens(tmp_path / "mine", tmp_path / "home", workers=1)
    assert not (tmp_path / "home").exists()


# Reading


@pytest.fixture
def folder(letters, tmp_path):
    """Tokens of two documents in tokens/mine."""
    folder = tmp_path / "tokens" / "mine"
    write_tokens(corpus(write(tmp_path / "a.txt", "abc", "defg"), validation=0), folder)
    return folder


def test_windows_begin_at_their_starts(folder):
    windows = token_ids(read_windows(Tokens.open(folder).data, torch.tensor([2, 0, 5]), 4))
    expected = [["c", END_OF_TEXT, "d", "e"], ["a", "b", "c", END_OF_TEXT], ["e", "f", "g", END_OF_TEXT]]
    assert windows.tolist() == [[token if token == END_OF_TEXT else ord(token) for token in row] for row in expected]
    assert windows.dtype == torch.int64


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
    with pytest.raises(ValueError, match="split='test'"):
        Tokens.open(folder, "test")


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


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 12, 13])
def test_ranks_together_see_the_batch_of_one(ranks, batch):
    whole = window_starts(3, 17, batch, context=8, tokens=10_000)
    parts = [whole[rank_slice(rank, ranks, batch)] for rank in range(ranks)]
    assert torch.equal(torch.cat(parts), whole)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_window_starts_are_uniform_reach_both_ends_and_differ_by_seed_and_step():
    drawn = torch.stack([window_starts(0, step, 100, context=4, tokens=14) for step in range(100)])
    counts = torch.bincount(drawn.flatten(), minlength=10)
    assert len(counts) == 10
    assert ((counts - 1000).abs() < 5 * 1000**0.5).all()
    first = window_starts(0, 0, 50, 4, 10**9)
    assert torch.equal(first, window_starts(0, 0, 50, 4, 10**9))
    for other in (window_starts(1, 0, 50, 4, 10**9), window_starts(0, 1, 50, 4, 10**9)):
        assert not torch.isin(first, other).any()
    assert window_starts(0, 0, 3, context=4, tokens=5).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="tokens=4 are too few"):
        window_starts(0, 0, 3, context=4, tokens=4)
