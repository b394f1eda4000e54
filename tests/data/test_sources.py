"""Sources: files of every kind become the same data set, and what is wrong with them is said in plain words."""

import io
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from raffm.data import sources
from raffm.data.images import decoded
from raffm.data.sources import Columns, load
from raffm.errors import DataError

REAL = Path(os.environ.get("RAFFM_DATA") or Path(__file__).parents[3] / "shared" / "data")


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("RAFFM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RAFFM_DATA", str(tmp_path / "known"))
    monkeypatch.chdir(tmp_path)


def picture(value, size=(4, 4), mode="RGB", kind="PNG"):
    stream = io.BytesIO()
    Image.new(mode, size, value).save(stream, kind)
    return stream.getvalue()


def cells(count, **options):
    return [{"bytes": picture((row, 0, 255), **options), "path": None} for row in range(count)]


def write(path, columns, features=None, rows=2):
    table = pa.table(columns)
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows)
    return path


def write_images(folder, count=5, labels=None, features=None, part="train", **options):
    columns = {"img": cells(count, **options), "label": labels or [row % 2 for row in range(count)]}
    return write(folder / f"{part}.parquet", columns, features)


def tokenizer(words=("a", "b", "c"), pad_token="[PAD]", **options):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(("[PAD]", "[UNK]", *words))}, "[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=pad_token, unk_token="[UNK]", **options)


NAMED = {"img": {"_type": "Image"}, "label": {"names": ["cat", "dog", "emu"], "_type": "ClassLabel"}}


def test_digits_are_1437_and_360_images_of_8_by_8_the_same_each_time():
    one, again = load("digits"), load("digits")
    assert one.train.inputs["pixel_values"].shape == (1437, 1, 8, 8)
    assert one.test.inputs["pixel_values"].shape == (360, 1, 8, 8)
    assert one.train.inputs["pixel_values"].dtype == torch.uint8
    assert one.train.inputs["pixel_values"].max() == 255
    assert one.classes == tuple("0123456789")
    assert torch.equal(one.test.inputs["pixel_values"], again.test.inputs["pixel_values"])
    assert one.test.labels.bincount().min() >= 34


def test_digits_can_have_another_size():
    assert load("digits", image_size=16).test.inputs["pixel_values"].shape == (360, 1, 16, 16)


def test_parquet_images_become_pixels_by_channel_with_the_names_of_their_classes(tmp_path):
    write_images(tmp_path / "set", 5, features=NAMED)
    write_images(tmp_path / "set", 3, features=NAMED, part="test")
    found = load(str(tmp_path / "set"))
    assert found.train.inputs["pixel_values"].shape == (5, 3, 4, 4)
    assert found.train.inputs["pixel_values"][:, :, 0, 0].tolist() == [[row, 0, 255] for row in range(5)]
    assert found.train.labels.tolist() == [0, 1, 0, 1, 0] and found.train.labels.dtype == torch.int64
    assert found.classes == ("cat", "dog", "emu")
    assert len(found.test) == 3 and found.validation is None and found.owners is None


def test_a_validation_file_is_the_validation_set(tmp_path):
    for count, part in enumerate(("train", "validation", "test"), 2):
        write_images(tmp_path / "set", count, part=part)
    found = load("set")
    assert found.validation is not None
    assert (len(found.train), len(found.validation), len(found.test)) == (2, 3, 4)


def test_a_known_name_is_found_in_the_data_folder_before_the_working_folder(tmp_path):
    write_images(tmp_path / "known" / "some", 6)
    write_images(tmp_path / "some", 10)
    assert len(load("some").train) == 4  # a fifth, rounded up, is for tests
    assert load("some").name == "some"


def test_files_beside_each_other_are_found_by_their_first_name(tmp_path):
    for part in ("train", "validation"):
        write(tmp_path / "known" / "glue" / f"cola-{part}.parquet", {"sentence": ["a b", "c"], "label": [0, 1]})
    assert load("glue/cola", tokenizer=tokenizer()).train.inputs["input_ids"].tolist() == [[2, 3], [4, 0]]


def test_the_shards_of_a_downloaded_repository_are_one_part(tmp_path):
    for shard in range(2):
        write(tmp_path / "set" / "data" / f"train-0000{shard}-of-00002.parquet", {"image": cells(3), "label": [0, 1, 2]})
    write(tmp_path / "set" / "data" / "test-00000-of-00001.parquet", {"image": cells(2), "label": [2, 1]})
    assert load("set").train.labels.tolist() == [0, 1, 2, 0, 1, 2]


def test_labels_without_names_are_numbered_by_their_sorted_values(tmp_path):
    write_images(tmp_path / "set", 3, labels=[7, -1, 3])
    write_images(tmp_path / "set", 2, labels=[3, 3], part="test")
    found = load("set")
    assert found.classes == ("-1", "3", "7")
    assert found.train.labels.tolist() == [2, 0, 1] and found.test.labels.tolist() == [1, 1]


def test_words_and_truths_can_be_labels(tmp_path):
    write_images(tmp_path / "words", 3, labels=["dog", "cat", "dog"])
    write_images(tmp_path / "words", 1, labels=["cat"], part="test")
    assert load("words").classes == ("cat", "dog") and load("words").train.labels.tolist() == [1, 0, 1]
    table = {"text": ["a"] * 5, "label": pa.array(["no", "yes", "no", "no", "no"]).dictionary_encode()}
    write(tmp_path / "coded.parquet", table)
    assert load("coded.parquet", tokenizer=tokenizer()).classes == ("no", "yes")
    write(tmp_path / "truths.parquet", {"text": ["a"] * 4, "label": [True, False, True, True]})
    assert load("truths.parquet", tokenizer=tokenizer()).classes == ("False", "True")


def test_an_owner_column_gives_owners_numbered_alike_in_train_and_test(tmp_path):
    for part, who in (("train", ["zoe", "ann", "zoe"]), ("test", ["bob", "zoe", "ann"])):
        write(tmp_path / "set" / f"{part}.parquet", {"img": cells(3), "label": [0, 1, 1], "who": who})
    found = load("set", columns=Columns(owner="who"))
    assert found.owners is not None
    assert [owners.tolist() for owners in found.owners] == [[2, 0, 2], [1, 2, 0]]


def test_owners_follow_their_examples_into_a_held_out_fifth(tmp_path):
    write(tmp_path / "set.parquet", {"img": cells(10), "label": [0, 1] * 5, "who": list(range(10))})
    found = load("set.parquet", columns=Columns(owner="who"))
    assert found.owners is not None
    for examples, owners in zip((found.train, found.test), found.owners, strict=True):
        assert examples.inputs["pixel_values"][:, 0, 0, 0].tolist() == owners.tolist()


def test_hidden_test_labels_make_the_validation_set_the_test_set(tmp_path):
    for part, labels in (("train", [0, 1, 1]), ("validation", [1, 0]), ("test", [-1, -1, -1, -1])):
        write_images(tmp_path / "set", len(labels), labels=labels, part=part, features=NAMED)
    found = load("set")
    assert found.test.labels.tolist() == [1, 0] and found.validation is None


def test_a_test_set_without_labels_counts_as_hidden(tmp_path):
    write_images(tmp_path / "set", 3)
    write_images(tmp_path / "set", 2, part="validation")
    write(tmp_path / "set" / "test.parquet", {"img": cells(4)})
    assert len(load("set").test) == 2


def test_hidden_test_labels_without_a_validation_set_are_refused(tmp_path):
    write_images(tmp_path / "set", 3)
    write_images(tmp_path / "set", 2, labels=[-1, -1], part="test")
    with pytest.raises(DataError, match=r"hidden \(-1\) and there is no validation set"):
        load("set")


def test_gray_images_stay_gray_unless_one_has_colours(tmp_path):
    gray, colour = picture(9, mode="L"), picture((1, 2, 3))
    assert decoded([gray, gray], 2, "here", None).shape == (2, 1, 4, 4)
    for order in ([gray, colour], [colour, gray]):
        pixels = decoded(order, 2, "here", None)
        assert pixels.shape == (2, 3, 4, 4)
        assert sorted(pixels[:, :, 0, 0].tolist()) == [[1, 2, 3], [9, 9, 9]]


def test_transparent_and_indexed_images_become_rgb():
    kinds = [picture((1, 2, 3, 255), mode="RGBA"), picture(0, mode="P"), picture(1, mode="1")]
    assert decoded(kinds, 3, "here", None).shape == (3, 3, 4, 4)


def test_images_are_resized_to_a_square(tmp_path):
    write_images(tmp_path / "set", 5, size=(6, 3))
    assert load("set", image_size=8).train.inputs["pixel_values"].shape == (4, 3, 8, 8)
    assert load("set").train.inputs["pixel_values"].shape == (4, 3, 3, 6)


def test_images_of_different_sizes_are_refused_with_their_sizes(tmp_path):
    columns = {"img": [picture(0, (4, 5)), picture(0, (4, 5)), picture(0, (6, 7))], "label": [0, 1, 0]}
    write(tmp_path / "set.parquet", columns)
    with pytest.raises(DataError, match=r"row 2 of .*set\.parquet has 6 x 7 pixels, those before it 4 x 5\. Give image_size"):
        load("set.parquet")


@pytest.mark.parametrize("broken", [b"no image", picture(3)[:-30], b""])
def test_a_broken_image_is_named_by_its_row(tmp_path, broken):
    write(tmp_path / "set.parquet", {"img": [picture(0), picture(0), broken, picture(0)], "label": [0, 1, 0, 1]})
    with pytest.raises(DataError, match=r"row 2 of .*set\.parquet"):
        load("set.parquet")


def test_images_are_decoded_once(tmp_path, monkeypatch):
    write_images(tmp_path / "set", 5)
    first = load("set").train.inputs["pixel_values"]
    monkeypatch.setattr(Image, "open", None)
    assert torch.equal(load("set").train.inputs["pixel_values"], first)


def test_a_file_that_changed_is_decoded_again(tmp_path):
    write_images(tmp_path / "set", 5)
    load("set")
    write_images(tmp_path / "set", 5, size=(2, 2))
    assert load("set").train.inputs["pixel_values"].shape == (4, 3, 2, 2)


def image_folder(root, classes=("ant", "bee"), count=5):
    for place, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for row in range(count):
            (root / name / f"{row}.png").write_bytes(picture((place, row, 0)))


def test_folders_of_images_are_classes(tmp_path):
    image_folder(tmp_path / "set" / "train")
    image_folder(tmp_path / "set" / "test", count=2)
    (tmp_path / "set" / "train" / "ant" / "notes.txt").write_text("not an image")
    found = load("set")
    assert found.classes == ("ant", "bee")
    assert found.train.inputs["pixel_values"][:, 0, 0, 0].tolist() == found.train.labels.tolist() == [0] * 5 + [1] * 5
    assert len(found.test) == 4


def test_a_folder_of_classes_alone_keeps_a_fixed_fifth_for_tests(tmp_path):
    image_folder(tmp_path / "set")
    one, again = load("set"), load(str(tmp_path / "set"))
    assert one.train.labels.tolist() == [0] * 4 + [1] * 4 and one.test.labels.tolist() == [0, 1]
    assert torch.equal(one.test.inputs["pixel_values"], again.test.inputs["pixel_values"])


def test_a_changed_image_in_a_folder_is_decoded_again(tmp_path):
    image_folder(tmp_path / "set")
    load("set")
    for file in (tmp_path / "set").glob("*/*.png"):
        file.write_bytes(picture((77, 0, 0), size=(5, 5)))
    assert load("set").train.inputs["pixel_values"].unique().tolist() == [0, 77]


def test_texts_are_padded_with_the_token_that_ends_them_where_there_is_no_other(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\na b a,0\na,1\n")
    (tmp_path / "test.csv").write_text("text,label\na,0\n")
    given = tokenizer(pad_token=None, eos_token="c")
    found = load(".", tokenizer=given).train.inputs
    assert found["input_ids"].tolist() == [[2, 3, 2], [2, given.eos_token_id, given.eos_token_id]]
    assert given.eos_token_id > 0


def test_csv_texts_are_tokenised_and_padded(tmp_path):
    (tmp_path / "train.csv").write_text('text,label\n"a b, c",good\n"a\nb",bad\n,good\n')
    (tmp_path / "test.csv").write_text("text,label\nb d,bad\n")
    found = load(".", tokenizer=tokenizer())
    assert found.classes == ("bad", "good") and found.train.labels.tolist() == [1, 0, 1]
    assert found.train.inputs["input_ids"].tolist() == [[2, 3, 1, 4], [2, 3, 0, 0], [0, 0, 0, 0]]
    assert found.train.inputs["input_ids"].dtype == torch.int32
    assert found.train.inputs["lengths"].tolist() == [4, 2, 1] and found.train.inputs["lengths"].dtype == torch.int64
    assert found.test.inputs["input_ids"].tolist() == [[3, 1]]


def test_texts_are_cut_to_max_length(tmp_path):
    write(tmp_path / "set.parquet", {"sentence": ["a b c a", "b"] * 5, "label": [0, 1] * 5})
    found = load("set.parquet", tokenizer=tokenizer(), max_length=3)
    assert found.train.inputs["input_ids"].shape == (8, 3) and found.train.inputs["lengths"].max() == 3


def test_many_texts_come_in_chunks_and_stay_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 3)
    write(tmp_path / "train.parquet", {"text": ["a " * (row % 5) for row in range(20)], "label": [0, 1] * 10}, rows=7)
    write(tmp_path / "test.parquet", {"text": ["a"], "label": [0]})
    assert load(".", tokenizer=tokenizer()).train.inputs["lengths"].tolist() == [max(1, row % 5) for row in range(20)]


def test_another_tokenizer_without_a_name_does_not_get_the_ids_of_the_first(tmp_path):
    write(tmp_path / "train.parquet", {"text": ["a b"], "label": [0]})
    write(tmp_path / "test.parquet", {"text": ["a"], "label": [0]})
    one = load(".", tokenizer=tokenizer(("a", "b", "c"))).train.inputs["input_ids"].tolist()
    other = load(".", tokenizer=tokenizer(("b", "a", "c"))).train.inputs["input_ids"].tolist()
    assert (one, other) == ([[2, 3]], [[3, 2]])


def test_texts_without_a_tokenizer_are_refused(tmp_path):
    write(tmp_path / "set.parquet", {"text": ["a"], "label": [0]})
    with pytest.raises(DataError, match=r"column 'text' of .* holds texts\. Give a tokenizer"):
        load("set.parquet")


def test_columns_can_be_named(tmp_path):
    write(tmp_path / "set.parquet", {"scan": cells(10), "text": ["a"] * 10, "kind": [0, 1] * 5, "label": [0] * 10})
    found = load("set.parquet", columns=Columns(input="scan", label="kind"))
    assert found.train.inputs["pixel_values"].shape == (8, 3, 4, 4) and len(found.classes) == 2


@pytest.mark.parametrize(
    ("columns", "asked", "message"),
    [
        ({"img": cells(2), "label": [0, 1]}, Columns(label="kind"), r"no column 'kind'\. It has: img, label"),
        ({"img": cells(2), "label": [0, 1]}, Columns(owner="who"), "no column 'who'"),
        (
            {"first": ["a"], "label": [0]},
            Columns(),
            r"columns first, label: none is known as the input\. Name it: data\.input, or in Python Columns\(input",
        ),
        (
            {"img": cells(2), "kind": [0, 1]},
            Columns(),
            r"none is known as the label\. Name it: data\.label, or in Python Columns\(label",
        ),
        ({"img": cells(2), "label": [0.5, 1.0]}, Columns(), "column 'label' of .* type double, but classes"),
        ({"img": cells(2), "label": [0, None]}, Columns(), "no 'label' in row 1"),
        ({"img": [None, picture(0)], "label": [0, 1]}, Columns(), "row 0 of .* has no image"),
        ({"text": ["a", None], "label": [0, 1]}, Columns(), "row 1 of .* has None where a text should be"),
        ({"img": pa.array([], pa.binary()), "label": pa.array([], pa.int64())}, Columns(), "is empty"),
        ({"img": cells(1), "label": [0]}, Columns(), "no training examples"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(tmp_path, columns, asked, message):
    write(tmp_path / "set.parquet", columns)
    with pytest.raises(DataError, match=message):
        load("set.parquet", columns=asked, tokenizer=tokenizer())


@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_labels_beyond_the_named_classes_are_refused(tmp_path, part):
    for name in ("train", "validation", "test"):
        write_images(tmp_path / "set", 2, labels=[0, 3 if name == part else 1], part=name, features=NAMED)
    with pytest.raises(DataError, match="label 3, but there are 3 classes"):
        load("set")


def test_a_test_file_without_the_input_is_refused(tmp_path):
    write_images(tmp_path / "set", 2)
    write(tmp_path / "set" / "test.parquet", {"image": cells(1), "label": [0]})
    with pytest.raises(DataError, match=r"test\.parquet has no column 'img'\. It has: image, label"):
        load("set")


@pytest.mark.parametrize("name", ["set.parquet", "set.csv", "set.json"])
def test_files_that_are_not_what_they_say_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot be read|neither a \.parquet nor a \.csv"):
        load(name)


def test_a_damaged_row_group_is_refused(tmp_path):
    file = write(tmp_path / "set.parquet", {"text": ["a b c " * 50] * 50, "label": list(range(50))}, rows=50)
    content = bytearray(file.read_bytes())
    content[4:200] = bytes(196)
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"set\.parquet' cannot be read"):
        load("set.parquet", tokenizer=tokenizer())


def test_a_folder_without_data_says_what_belongs_there(tmp_path):
    (tmp_path / "set").mkdir()
    with pytest.raises(DataError, match=r"holds no data: expected train\.parquet"):
        load("set")


def test_a_source_without_a_training_part_is_refused(tmp_path):
    write_images(tmp_path / "set", 2, part="test")
    with pytest.raises(DataError, match="no part named 'train', only: test"):
        load("set")


@pytest.mark.parametrize(
    ("options", "message"), [({"image_size": 0}, "image_size is 0"), ({"max_length": 0}, "max_length is 0")]
)
def test_sizes_below_one_are_refused(options, message):
    with pytest.raises(DataError, match=message):
        load("digits", **options)


def test_an_unknown_name_says_where_to_put_files(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        DataError, match=r"no data set 'nowhere/set'.*not installed\. Put train\.parquet and test\.parquet into"
    ):
        load("nowhere/set")


def test_a_library_that_is_missing_is_named_with_how_to_get_it(tmp_path, monkeypatch):
    write_images(tmp_path / "set", 2)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"needs PIL: pip install 'raffm\[data\]'"):
        load("set")


class HubPart:
    """What `datasets` gives for a part, as far as we use it."""

    def __init__(self, table, features):
        self.table, self.features, self.num_rows, self.cache_files = table, self, table.num_rows, []
        self.to_dict = lambda: features

    def with_format(self, kind):
        assert kind == "arrow"
        return self

    def __getitem__(self, rows):
        return self.table[rows] if rows != slice(None) else self.table


def hub(monkeypatch, load_dataset):
    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_a_hugging_face_set_is_read_like_any_other(monkeypatch):
    asked = []

    def load_dataset(*names):
        asked.append(names)
        table = pa.table({"img": cells(4), "label": [0, 1, 2, 0]})
        return {"train": HubPart(table, {**NAMED, "boxes": [{"_type": "Value"}]}), "test": HubPart(table, NAMED)}

    hub(monkeypatch, load_dataset)
    found = load("owner/set:small")
    assert asked == [("owner/set", "small")]
    assert found.train.inputs["pixel_values"].shape == (4, 3, 4, 4) and found.classes == ("cat", "dog", "emu")


@pytest.mark.slow
def test_the_real_datasets_library_gives_what_we_expect_of_it(tmp_path):
    pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    for part in ("train", "test"):
        write_images(tmp_path / "set", 4, part=part, features=NAMED)
    code = """
from raffm.data.sources import load
found = load("./set:default")  # no such path: `datasets` reads the folder
assert found.train.inputs["pixel_values"].shape == (4, 3, 4, 4)
assert found.train.labels.tolist() == [0, 1, 0, 1] and found.classes == ("cat", "dog", "emu")
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_a_set_that_hugging_face_does_not_have_says_where_to_put_files(monkeypatch):
    def load_dataset(*names):
        raise FileNotFoundError("Dataset doesn't exist on the Hub.")

    hub(monkeypatch, load_dataset)
    with pytest.raises(DataError, match=r"gives no data set 'owner/set': Dataset doesn't exist on the Hub\. Put train"):
        load("owner/set")


def test_a_bar_shows_progress_where_someone_watches(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    write_images(tmp_path / "set", 5)
    assert len(load("set").train) == 4


def test_data_work_where_neither_datasets_nor_flwr_can_be_imported(tmp_path):
    code = """
import sys
for name in ("datasets", "flwr"):
    sys.modules[name] = None
from raffm.data import cache, examples, images, sources, splits, task, text
found = splits.hold_out(sources.load("digits"), 0.1, 0)
made = cache.split_cached(found, 10, "dirichlet-balanced", 0, alpha=0.3)
assert len(made.train) == 10 and len(made.train.indices) == len(found.train)
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def real(monkeypatch):
    if not REAL.is_dir():
        pytest.skip(f"there are no real data in {REAL}: set RAFFM_DATA")
    monkeypatch.setenv("RAFFM_DATA", str(REAL))


@pytest.mark.slow
def test_cifar10_has_5000_training_and_1000_test_images_of_each_class(real):
    found = load("cifar10")
    assert found.train.inputs["pixel_values"].shape == (50_000, 3, 32, 32)
    assert found.test.inputs["pixel_values"].shape == (10_000, 3, 32, 32)
    assert found.train.labels.bincount().tolist() == [5000] * 10
    assert found.test.labels.bincount().tolist() == [1000] * 10
    assert found.classes[0] == "airplane" and found.classes[9] == "truck"
    means = found.train.inputs["pixel_values"].float().mean((0, 2, 3)) / 255
    assert np.allclose(means, (0.4914, 0.4822, 0.4465), atol=1e-4)


@pytest.mark.slow
def test_flowers_of_many_sizes_are_resized(real):
    with pytest.raises(DataError, match="Give image_size"):
        load("flowers102")
    found = load("flowers102", image_size=64)
    assert found.validation is not None
    assert found.train.inputs["pixel_values"].shape == (1020, 3, 64, 64)
    assert (len(found.validation), len(found.test), len(found.classes)) == (1020, 6149, 102)


@pytest.mark.slow
def test_ag_news_has_four_classes_of_texts(real):
    found = load("ag_news", tokenizer=tokenizer(("the", "of")), max_length=64)
    assert (len(found.train), len(found.test)) == (41_993, 7600)
    assert found.classes == ("World", "Sports", "Business", "Sci/Tech")
    assert found.train.inputs["input_ids"].shape == (41_993, 64) and found.train.inputs["lengths"].min() > 1


@pytest.mark.slow
def test_sst2_is_tested_on_its_validation_set_because_test_labels_are_hidden(real):
    found = load("sst2", tokenizer=tokenizer(("the", "of")))
    assert (len(found.train), len(found.test)) == (67_349, 872) and found.validation is None
    assert found.classes == ("negative", "positive")


@pytest.mark.slow
def test_a_set_of_glue_is_found_by_its_folder_and_name(real):
    assert len(load("glue_small/cola", tokenizer=tokenizer()).train) == 8551
    assert load("stsb", tokenizer=tokenizer()).train.labels.max() == 5.0
