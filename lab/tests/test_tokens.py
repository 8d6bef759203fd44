"""Text becomes the same tokens however it is prepared, is verified when it is read, and is drawn alike by all ranks."""

import hashlib
import io
import lzma
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from real import DATA

from mvngrad_lab.tasks import files
from mvngrad_lab.tasks.files import DamagedFile, KnownFile
from mvngrad_lab.tasks.language.data import prepared as from_names, text, text_bpe, text_corpora, text_documents
from mvngrad_lab.tasks.language.data.text import prepare
from mvngrad_lab.tasks.language.data.tokens import END_OF_TEXT, Manifest, Tokens, numbers, offsets, share, windows

WRITTEN = ("manifest.json", "train.bin", "validation.bin")

pytestmark = pytest.mark.usefixtures("no_data")


@pytest.fixture
def letters(letters, monkeypatch):
    """Prepares by bytes instead of GPT-2's tokens, in pieces of a few documents."""
    monkeypatch.setattr(text_documents, "PIECE_BYTES", 100)


@pytest.fixture
def vocabulary():
    """GPT-2's own."""
    pytest.importorskip("tiktoken", reason="needs tiktoken")
    if not (DATA / "gpt2_bpe").exists():
        pytest.skip("needs GPT-2's encoder.json and vocab.bpe")
    return DATA / "gpt2_bpe"


def document(number):
    return f"Document {number}\n\nof {'many ' * (number % 7)}words, and größer."


def write(path, documents):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("\n<|endoftext|>\n".join(documents).encode())
    return path


def contents(folder):
    return {name: (folder / name).read_bytes() for name in WRITTEN}


def told(folder, split):
    """The documents of a split that was prepared by bytes."""
    found, current = [], bytearray()
    for number in numbers(Tokens.open(folder, split).data).tolist():
        if number == END_OF_TEXT:
            found.append(current.decode())
            current.clear()
        else:
            current.append(number)
    assert not current
    return found


# Preparing


@pytest.mark.usefixtures("letters")
def test_every_document_is_in_one_split_in_its_order(tmp_path):
    documents = [document(number) for number in range(200)]
    path = write(tmp_path / "a.txt", documents)
    manifest = prepare([path], tmp_path / "out", source="test", validation=0.2)
    train, validation = told(tmp_path / "out", "train"), told(tmp_path / "out", "validation")
    assert [text for text in documents if text in set(train)] == train
    assert [text for text in documents if text in set(validation)] == validation
    assert sorted(train + validation) == sorted(documents)
    assert 20 < len(validation) < 60
    assert (manifest.train.documents, manifest.validation.documents) == (len(train), len(validation))
    assert manifest.files == (("a.txt", path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()),)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == list(WRITTEN)


@pytest.mark.usefixtures("letters")
def test_what_is_held_out_depends_neither_on_order_nor_on_company(tmp_path):
    documents = [document(number) for number in range(200)]
    prepare([write(tmp_path / "a.txt", documents)], tmp_path / "a", source="test", validation=0.2)
    backwards = [write(tmp_path / "b.txt", documents[:90:-1]), write(tmp_path / "c.txt", ["new", "too"])]
    prepare(backwards, tmp_path / "b", source="test", validation=0.2)
    held = set(told(tmp_path / "a", "validation"))
    assert {text for text in told(tmp_path / "b", "validation") if text in documents} == held & set(documents[91:])


@pytest.mark.usefixtures("letters")
def test_official_validation_text_is_used_as_it_is(tmp_path):
    train, official = write(tmp_path / "a.txt", ["one", "two"]), write(tmp_path / "b.txt", ["three"])
    manifest = prepare([train], tmp_path / "out", source="test", validation=[official])
    assert (told(tmp_path / "out", "train"), told(tmp_path / "out", "validation")) == (["one", "two"], ["three"])
    assert manifest.split == "validation: b.txt"
    prepare([official], tmp_path / "all", source="test", validation=1.0)
    assert (told(tmp_path / "all", "train"), told(tmp_path / "all", "validation")) == ([], ["three"])


@pytest.mark.usefixtures("letters")
def test_a_preparation_that_broke_off_goes_on_and_ends_the_same(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", [document(number) for number in range(100)])
    prepare([path], tmp_path / "whole", source="test")
    made, count = [], text._make

    def breaks(shard):
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append(shard)
        count(shard)

    monkeypatch.setattr(text, "_make", breaks)
    with pytest.raises(KeyboardInterrupt):
        prepare([path], tmp_path / "out", source="test")
    with pytest.raises(FileNotFoundError, match="not to the end"):
        Tokens.open(tmp_path / "out")
    # As if the process had died while it wrote the sixth, and the disk had lost half of the fifth.
    (tmp_path / "out" / "shards" / "other.1.part").write_bytes(b"half")
    made[4].path.write_bytes(made[4].path.read_bytes()[:-2])
    again, seen = [], []
    monkeypatch.setattr(text, "_make", lambda shard: (again.append(shard), count(shard)))
    prepare([path], tmp_path / "out", source="test", on_progress=lambda done, total: seen.append((done, total)))
    assert not {shard.path for shard in again} & {shard.path for shard in made[:4]}
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    size = path.stat().st_size
    assert seen[0][0] > 0
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)


@pytest.mark.usefixtures("letters")
def test_what_is_prepared_is_kept_and_what_differs_is_not(tmp_path, monkeypatch):
    path, out = write(tmp_path / "a.txt", [document(number) for number in range(30)]), tmp_path / "out"
    first = prepare([path], out, source="test")
    with monkeypatch.context() as patch:
        patch.setattr(text, "_make", None)
        assert prepare([path], out, source="test") == first
    content = bytearray((out / "train.bin").read_bytes())
    content[7] ^= 1
    (out / "train.bin").write_bytes(content)
    assert prepare([path], out, source="test") == first
    Tokens.open(out, checksum=True)
    assert prepare([path], out, source="test", validation=0.5).validation.documents > first.validation.documents
    write(path, ["other text"])
    assert prepare([path], out, source="test").train.documents == 1


@pytest.mark.usefixtures("letters")
def test_tokens_stay_when_more_is_known_of_their_source_and_a_verified_one_stays_verified(tmp_path, monkeypatch):
    path, out = write(tmp_path / "a.txt", ["one"]), tmp_path / "out"
    prepare([path], out, source="text, not verified")
    monkeypatch.setattr(text, "_make", None)
    for source in ("text, sha256 verified", "text, not verified"):
        assert prepare([path], out, source=source).source == "text, sha256 verified"
        assert Manifest.read(out).source == "text, sha256 verified"


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize("content", [[], [" \n "]], ids=["empty", "blank"])
def test_a_text_with_nothing_to_train_on_is_refused_and_tokens_that_are_there_stay(tmp_path, content):
    path, out = write(tmp_path / "a.txt", ["one"]), tmp_path / "out"
    kept = prepare([path], out, source="test")
    write(path, content)
    with pytest.raises(ValueError, match=r"has nothing to train on: a\.txt is blank, or held out"):
        prepare([path], out, source="test", validation=[write(tmp_path / "b.txt", ["two"])])
    assert Manifest.read(out) == kept


@pytest.mark.usefixtures("letters")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_with_the_file(tmp_path, monkeypatch):
    path, out = write(tmp_path / "a.txt", ["one"]), tmp_path / "out"
    out.mkdir()
    (out / "train.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*train\.part"):
        prepare([path], out, source="test")

    def full(self, content):
        with Path("/dev/full").open("wb") as file:
            file.write(content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: .*shards.*\.part"):
        prepare([path], tmp_path / "other", source="test")


def test_the_number_of_workers_changes_nothing(tmp_path, vocabulary, monkeypatch):
    path = write(tmp_path / "a.txt", [document(number) for number in range(300)])
    monkeypatch.setattr(text_documents, "PIECE_BYTES", 1000)
    for folder, count in (("alone", 1), ("together", 3)):
        prepare([path], tmp_path / folder, source="test", vocabulary=vocabulary, validation=0.1, workers=count)
    assert contents(tmp_path / "together") == contents(tmp_path / "alone")


def test_tokens_are_gpt2s_and_decode_to_the_text(tmp_path, vocabulary):
    texts = ["Hello world", "It's 2026,\n\n  größer than 日本 <|endoftext|> inside"]
    prepare([write(tmp_path / "a.txt", texts)], tmp_path / "out", source="test", validation=0, vocabulary=vocabulary)
    first, rest = numbers(Tokens.open(tmp_path / "out", checksum=True).data).tensor_split([3])
    assert first.tolist() == [15496, 995, END_OF_TEXT]
    rest = rest.tolist()
    assert rest.count(END_OF_TEXT) == 1
    assert text_bpe.encoding(vocabulary).decode(rest) == texts[1] + "<|endoftext|>"


def test_a_vocabulary_that_was_altered_is_refused(tmp_path, vocabulary):
    for known in text_bpe.FILES:
        (tmp_path / known.name).write_bytes((vocabulary / known.name).read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedFile, match=r"encoder\.json"):
        text_bpe.encoding(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"), [({"validation": 1.5}, r"validation=1\.5 is not a share"), ({}, "files is empty")]
)
def test_errors_of_prepare_name_the_argument(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        prepare([], tmp_path / "out", source="test", **settings)


# Documents


def documents_of(path):
    return [text for piece in text_documents.pieces(path) for text in text_documents.documents(piece)]


@pytest.mark.parametrize("size", [1, 7, 30, 10**6])
def test_pieces_of_any_size_have_the_same_documents(tmp_path, monkeypatch, size):
    monkeypatch.setattr(text_documents, "PIECE_BYTES", size)
    path = tmp_path / "a.txt"
    path.write_bytes(
        b"<|endoftext|>\none\n<|endoftext|>\n<|endoftext|>\r\ntwo <|endoftext|> lines\n\n\n<|endoftext|>\n "
    )
    assert documents_of(path) == ["one", "two <|endoftext|> lines\n\n"]
    path.write_bytes(b"")
    assert documents_of(path) == []


def test_articles_of_wikitext_begin_with_their_headings(tmp_path):
    articles = [" = One = \n \n text \n = 1 henry = \n \n = = Part = = \n \n", " = Two ( film ) = \n \n more \n"]
    path = tmp_path / "wiki.train.tokens"
    path.write_text(" \n" + articles[0] + " \n" + articles[1])
    assert documents_of(path) == [" \n" + articles[0] + " \n", articles[1]]


@pytest.mark.skipif(not DATA.exists(), reason="needs WikiText-103's validation text")
@pytest.mark.parametrize("part", ["valid", "test"])
def test_wikitext103_has_sixty_articles_to_validate_and_sixty_to_test_on(tmp_path, part):
    content = lzma.decompress((DATA / "wikitext103" / f"wiki.{part}.tokens.xz").read_bytes())
    path = tmp_path / f"wiki.{part}.tokens"
    path.write_bytes(content)
    assert "".join(documents_of(path)).encode() == content
    assert len(documents_of(path)) == 60


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
    assert len(text_documents.pieces(path)) == 2
    assert documents_of(path) == ["one\n\nmore", "zwölf"]
    path.write_bytes(lzma.compress(path.read_bytes()))
    with pytest.raises(ValueError, match="not a plain tar archive"):
        text_documents.pieces(path)


def test_text_that_is_not_utf8_is_an_error_that_says_where(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"gr\xf6\xdfer")
    with pytest.raises(ValueError, match=r"a\.txt, in bytes 0 to 6: not UTF-8"):
        documents_of(path)
    with pytest.raises(ValueError, match=r"a\.pdf is no text by its name"):
        text_documents.pieces(tmp_path / "a.pdf")


# Where text comes from


@pytest.fixture
def published(monkeypatch):
    """Small archives in the place of the published ones; `downloads` counts how often each is asked for."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for part in ("train", "valid", "test"):
            archive.writestr(f"wikitext-103/wiki.{part}.tokens", f" \n = {part} = \n \n words \n")
    contents = {
        "wikitext103": packed.getvalue(),
        "openwebtext": lzma.compress(openwebtext({"1.txt": b"one"}, {"2.txt": b"two"})),
    }
    for name, known in text_corpora.ARCHIVES.items():
        digest = hashlib.sha256(contents[name]).hexdigest()
        monkeypatch.setitem(text_corpora.ARCHIVES, name, KnownFile(known.name, len(contents[name]), digest, True))
    valid = b" \n = valid = \n \n words \n"
    known = KnownFile("wiki.valid.tokens", len(valid), hashlib.sha256(valid).hexdigest())
    monkeypatch.setattr(text_corpora, "WIKITEXT103_VALIDATION", known)
    downloads = []

    def transfer(url, part, on_progress):
        downloads.append(url)
        part.write_bytes(contents["wikitext103" if "wikitext" in url else "openwebtext"])

    monkeypatch.setattr(files, "_transfer", transfer)
    return downloads


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize(
    ("name", "documents"), [("wikitext103", [" \n = train = \n \n words \n"]), ("openwebtext", ["one", "two"])]
)
def test_a_published_text_is_downloaded_once_verified_and_prepared(tmp_path, monkeypatch, published, name, documents):
    with pytest.raises(FileNotFoundError, match=f"mvngrad data get {name}"):
        text_corpora.corpus(name)
    text_corpora.download(name, tmp_path)
    assert text_corpora.download(name, tmp_path) == tmp_path
    assert len(published) == 1
    corpus = text_corpora.corpus(name, tmp_path)
    prepare(corpus.files, tmp_path / "out", source=corpus.source, validation=corpus.validation)
    assert told(tmp_path / "out", "train") == documents
    archive = tmp_path / name / text_corpora.ARCHIVES[name].name
    archive.write_bytes(archive.read_bytes()[:-1])
    with pytest.raises(DamagedFile, match="download it again"):
        text_corpora.download(name, tmp_path)
    monkeypatch.setenv("MVNGRAD_DATA", str(tmp_path / "variable"))
    assert text_corpora.download(name) == tmp_path / "variable"


@pytest.mark.parametrize("name", ["wikitext103", "openwebtext"])
def test_only_a_text_that_its_archive_holds_is_called_verified(tmp_path, published, name):
    text_corpora.download(name, tmp_path)
    known = text_corpora.ARCHIVES[name]
    archive, path = tmp_path / name / known.name, text_corpora.corpus(name, tmp_path).files[0]
    assert text_corpora.corpus(name, tmp_path).source.endswith("training text as published, sha256 verified")
    content = path.read_bytes()
    for other in (content + b"x", content[:-1], b"x" + content[1:]):
        path.write_bytes(other)
        with pytest.raises(DamagedFile, match=rf"{path.name} is not what .*{known.name} holds; delete it"):
            text_corpora.corpus(name, tmp_path)
    archive.rename(tmp_path / known.name)  # beside the folder of its name
    with pytest.raises(DamagedFile, match="is not what"):
        text_corpora.corpus(name, tmp_path)
    (tmp_path / known.name).write_bytes(b"another archive")
    with pytest.raises(DamagedFile, match=f"is not {known.name} as published"):
        text_corpora.corpus(name, tmp_path)
    (tmp_path / known.name).unlink()
    assert text_corpora.corpus(name, tmp_path).source.endswith("training text not verified")


def test_subsets_of_openwebtext_are_not_called_verified(tmp_path, published):
    text_corpora.download("openwebtext", tmp_path)
    (tmp_path / "openwebtext" / "openwebtext.tar").rename(tmp_path / "openwebtext" / "urlsf_subset00.tar")
    says = "OpenWebText, 1 of its 21 subsets, training text not verified"
    assert text_corpora.corpus("openwebtext", tmp_path).source == says


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize("name", ["wikitext103", "openwebtext"])
def test_an_archive_beside_the_folder_of_its_name_is_taken(tmp_path, published, name):
    text_corpora.download(name, tmp_path / "first")
    known = text_corpora.ARCHIVES[name]
    (tmp_path / "first" / name / known.name).rename(tmp_path / known.name)
    folder = from_names.prepared(name, tmp_path, workers=1)
    assert len(published) == 1
    assert Manifest.read(folder).source.endswith("sha256 verified")


@pytest.mark.usefixtures("published")
def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    mine = write(tmp_path / "mine" / "a.txt", ["one"]).parent
    write(mine / "validation.txt", ["two"])
    for prepared in (
        lambda data: from_names.prepared("wikitext103", data),
        lambda d: from_names.prepare_folder(mine, d),
    ):
        with pytest.raises(OSError, match=r"file', given as --data or folder, is not a folder; name one"):
            prepared(tmp_path / "file")


def test_the_stand_in_is_called_one(tmp_path):
    write(tmp_path / "wikipedia_en" / "wikipedia_en.0.txt", ["one"])
    assert "stand-in" in text_corpora.corpus("wikipedia_en", tmp_path).source


def test_a_folder_of_text_is_taken_in_the_order_of_its_names(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt", "d.md"):
        write(tmp_path / "mine" / name, [name])
    corpus = text_corpora.in_folder(tmp_path / "mine")
    assert [path.name for path in corpus.files] == ["a.txt", "b.txt", "c.txt"]
    assert corpus.source == "text of the folder mine"
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no \.txt files"):
        text_corpora.in_folder(tmp_path / "empty")


# Reading


@pytest.fixture
def prepared(letters, tmp_path):
    prepare([write(tmp_path / "a.txt", ["abc", "defg"])], tmp_path / "out", source="test", validation=0)
    return tmp_path / "out"


def test_windows_are_where_they_should_be(prepared):
    found = windows(Tokens.open(prepared, checksum=True).data, torch.tensor([2, 0, 5]), 4)
    expected = [["c", END_OF_TEXT, "d", "e"], ["a", "b", "c", END_OF_TEXT], ["e", "f", "g", END_OF_TEXT]]
    assert found.tolist() == [[token if token == END_OF_TEXT else ord(token) for token in row] for row in expected]
    assert found.dtype == torch.int64


def test_a_file_cut_short_or_altered_is_not_read(prepared):
    path = prepared / "train.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    with pytest.raises(DamagedFile, match="has 16 bytes and not 18"):
        Tokens.open(prepared)
    path.write_bytes(b"\0" + content[1:])
    with pytest.raises(DamagedFile, match="sha256"):
        Tokens.open(prepared, checksum=True)
    path.unlink()
    with pytest.raises(DamagedFile, match="has 0 bytes"):
        Tokens.open(prepared)
    (prepared / "manifest.json").write_text("{")
    with pytest.raises(DamagedFile, match="cannot be read"):
        Manifest.read(prepared)
    with pytest.raises(ValueError, match="split='test'"):
        Tokens.open(prepared, "test")


# Which windows a step sees


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 12, 13])
def test_ranks_together_see_the_batch_of_one(ranks, batch):
    whole = offsets(3, 17, batch, context=8, tokens=10_000)
    parts = [whole[share(rank, ranks, batch)] for rank in range(ranks)]
    assert torch.equal(torch.cat(parts), whole)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_offsets_are_even_reach_both_ends_and_differ_by_seed_and_step():
    drawn = torch.stack([offsets(0, step, 100, context=4, tokens=14) for step in range(100)])
    counts = torch.bincount(drawn.flatten(), minlength=10)
    assert len(counts) == 10
    assert ((counts - 1000).abs() < 5 * 1000**0.5).all()
    first = offsets(0, 0, 50, 4, 10**9)
    assert torch.equal(first, offsets(0, 0, 50, 4, 10**9))
    for other in (offsets(1, 0, 50, 4, 10**9), offsets(0, 1, 50, 4, 10**9)):
        assert not torch.isin(first, other).any()
    assert offsets(0, 0, 3, context=4, tokens=5).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="tokens=4 are too few"):
        offsets(0, 0, 3, context=4, tokens=4)
