"""The data sets by name: what they are, where they come from, under which terms. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Task = Literal["classification", "segmentation"]


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """One data set as listed.

    `counts` are the training and test examples as loaded from the full distribution, () where they depend on how the
    set was prepared; `packed_counts` those of the packed form where it holds fewer.
    """

    name: str
    summary: str
    source: str
    licence: str
    num_classes: int
    counts: tuple[int, int] | tuple[()] = ()
    packed_counts: tuple[int, int] | tuple[()] = ()
    embedded: bool = False
    task: Task = "classification"
    domains: tuple[str, ...] = ()


DIGIT_DOMAINS = ("mnist", "svhn", "usps", "synth_digits", "mnist_m")
OFFICE_DOMAINS = ("amazon", "caltech", "dslr", "webcam")
DOMAINNET_DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
PACS_DOMAINS = ("art_painting", "cartoon", "photo", "sketch")

_ALL = (
    DatasetInfo(
        name="fashion_mnist_small",
        summary="embedded balanced subset of Fashion-MNIST, 28x28 grey",
        source="https://github.com/zalandoresearch/fashion-mnist",
        licence="MIT",
        num_classes=10,
        counts=(10_000, 2_000),
        embedded=True,
    ),
    DatasetInfo(
        name="fashion_mnist",
        summary="Fashion-MNIST, 28x28 grey",
        source="https://github.com/zalandoresearch/fashion-mnist",
        licence="MIT",
        num_classes=10,
        counts=(60_000, 10_000),
    ),
    DatasetInfo(
        name="mnist",
        summary="MNIST handwritten digits, 28x28 grey",
        source="http://yann.lecun.com/exdb/mnist (closed; files from torchvision's mirror)",
        licence="CC BY-SA 3.0 (commonly stated)",
        num_classes=10,
        counts=(60_000, 10_000),
    ),
    DatasetInfo(
        name="cifar10",
        summary="CIFAR-10, 32x32 colour",
        source="https://www.cs.toronto.edu/~kriz/cifar.html",
        licence="none formal; free to use with citation (Krizhevsky 2009)",
        num_classes=10,
        counts=(50_000, 10_000),
    ),
    DatasetInfo(
        name="cifar100",
        summary="CIFAR-100 with its 100 fine labels, 32x32 colour",
        source="https://www.cs.toronto.edu/~kriz/cifar.html",
        licence="none formal; free to use with citation (Krizhevsky 2009)",
        num_classes=100,
        counts=(50_000, 10_000),
    ),
    DatasetInfo(
        name="usps",
        summary="USPS handwritten digits, 16x16 grey",
        source="https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps",
        licence="none formal; research use (Hull 1994)",
        num_classes=10,
        counts=(7_291, 2_007),
    ),
    DatasetInfo(
        name="svhn",
        summary="street view house numbers, 32x32 colour",
        source="http://ufldl.stanford.edu/housenumbers",
        licence="non-commercial use only (Netzer et al. 2011)",
        num_classes=10,
        counts=(73_257, 26_032),
        packed_counts=(7_438, 3_000),
    ),
    DatasetInfo(
        name="mnist_m",
        summary="MNIST digits blended into natural image patches, 28x28 colour",
        source="Ganin and Lempitsky 2015, http://yaroslav.ganin.net",
        licence="MNIST with BSDS500 (non-commercial research)",
        num_classes=10,
        counts=(59_001, 9_001),
        packed_counts=(7_438, 3_000),
    ),
    DatasetInfo(
        name="synth_digits",
        summary="digits rendered from fonts, 32x32 colour; the packed form and `made.py` are our own rendition",
        source="after Ganin and Lempitsky 2015, http://yaroslav.ganin.net",
        licence="the original states none; our rendition is Apache-2.0",
        num_classes=10,
        counts=(479_400, 9_553),
        packed_counts=(7_438, 3_000),
    ),
    DatasetInfo(
        name="digits_five",
        summary="five digit sets as domains, 28x28 colour, 7,438 training images each (FedBN's set-up)",
        source="mnist, svhn, usps, synth_digits, mnist_m",
        licence="that of its parts",
        num_classes=10,
        domains=DIGIT_DOMAINS,
    ),
    DatasetInfo(
        name="office_caltech10",
        summary="Office-31 and Caltech-256, ten common classes, four domains; 256x256 (packed: 96x96)",
        source="Saenko et al. 2010, Gong et al. 2012, Griffin et al. 2007",
        licence="research use",
        num_classes=10,
        counts=(2_025, 508),
        domains=OFFICE_DOMAINS,
    ),
    DatasetInfo(
        name="domainnet10",
        summary="DomainNet, the ten classes FedBN uses, six domains; 256x256",
        source="https://ai.bu.edu/M3SDA",
        licence="research use (Peng et al. 2019)",
        num_classes=10,
        domains=DOMAINNET_DOMAINS,
    ),
    DatasetInfo(
        name="pacs",
        summary="photo, art, cartoon, sketch; seven classes; 227x227 (packed: 64x64)",
        source="https://domaingeneralization.github.io (Li et al. 2017)",
        licence="research use",
        num_classes=7,
        counts=(7_992, 1_999),
        domains=PACS_DOMAINS,
    ),
    DatasetInfo(
        name="tiny_imagenet",
        summary="Tiny ImageNet, 200 classes, 64x64 colour; the validation images serve as test set",
        source="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        licence="ImageNet terms: non-commercial research",
        num_classes=200,
        counts=(100_000, 10_000),
    ),
    DatasetInfo(
        name="imagenet1k",
        summary="ImageNet ILSVRC 2012, 64x64 unless told; the validation images serve as test set",
        source="https://www.image-net.org",
        licence="ImageNet terms: non-commercial research",
        num_classes=1000,
        counts=(1_281_167, 50_000),
    ),
    DatasetInfo(
        name="cityscapes",
        summary="urban street scenes, 19 classes, one domain per city; the validation images serve as test set",
        source="https://www.cityscapes-dataset.com",
        licence="non-commercial; registration needed (Cordts et al. 2016)",
        num_classes=19,
        counts=(2_975, 500),
        task="segmentation",
    ),
    DatasetInfo(
        name="camvid",
        summary="driving scenes, 11 classes, one domain per sequence (SegNet's split; packed: 240x180)",
        source="http://mi.eng.cam.ac.uk/research/projects/VideoRec/CamVid",
        licence="research use (Brostow et al. 2008)",
        num_classes=11,
        counts=(367, 233),
        task="segmentation",
        domains=("0001TP", "0006R0", "0016E5", "Seq05VD"),
    ),
    DatasetInfo(
        name="femnist",
        summary="handwritten characters by writer, 62 classes, 28x28 grey, as LEAF prepares it",
        source="https://leaf.cmu.edu",
        licence="BSD-2 (LEAF); NIST Special Database 19 is public domain",
        num_classes=62,
    ),
)
DATASETS: dict[str, DatasetInfo] = {info.name: info for info in _ALL}
