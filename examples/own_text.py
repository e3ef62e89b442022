"""Texts of your own: sentences about three topics, each client in a language of its own, and a small transformer."""

import random

import torch
from torch import Tensor, nn

import fednorm

TOPICS = [
    ["rain", "sun", "wind", "snow", "cloud", "storm"],
    ["bread", "soup", "rice", "salt", "apple", "milk"],
    ["train", "road", "ship", "ticket", "map", "bridge"],
]
FILLERS = ["the", "and", "then", "very", "quite", "again", "today", "here"]
LANGUAGES = {"plain": "{}", "o-speak": "{}o", "hurried": "{:.2}", "prefixed": "un{}"}
LENGTH = 8
Text = tuple[list[str], int]


def texts(language: str, count: int, part: str) -> list[Text]:
    """Sentences of fillers with a few words that give the topic away, every word in this client's language."""
    rng = random.Random(f"{language} {part}")  # noqa: S311
    made: list[Text] = []
    for _ in range(count):
        topic = rng.randrange(len(TOPICS))
        words = [rng.choice(TOPICS[topic] if rng.random() < 0.3 else FILLERS) for _ in range(rng.randint(5, LENGTH))]
        made.append(([LANGUAGES[language].format(word) for word in words], topic))
    return made


train = [texts(language, 60, "train") for language in LANGUAGES]
test = [texts(language, 60, "test") for language in LANGUAGES]
known = sorted({word for client in train for words, _ in client for word in words})
number = {word: index for index, word in enumerate(known, 2)}  # 0 is padding, 1 a word that nobody trained on


def tokens(part: list[Text]) -> tuple[Tensor, Tensor]:
    rows = [[number.get(word, 1) for word in words] + [0] * (LENGTH - len(words)) for words, _ in part]
    return torch.tensor(rows), torch.tensor([topic for _, topic in part])


class Reader(nn.Module):
    """Stock layers of torch; dropout's masks are keyed, so that every engine and every restart draws the same."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(number) + 2, width, padding_idx=0)
        self.place = nn.Parameter(torch.zeros(LENGTH, width))
        self.encode = nn.TransformerEncoderLayer(width, nhead=2, dim_feedforward=32, dropout=0.1, batch_first=True)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, len(TOPICS))

    def forward(self, x: Tensor) -> Tensor:
        padding = x == 0
        read = self.encode(self.embed(x) + self.place, src_key_padding_mask=padding)
        return self.head(self.norm(read.masked_fill(padding.unsqueeze(-1), 0).sum(1) / LENGTH))


torch.manual_seed(0)
model = Reader()
for method in ("fedavg", "fedbn"):
    result = fednorm.run(
        model=model,
        clients=[tokens(part) for part in train],
        test=[tokens(part) for part in test],
        method=method,
        rounds=12,
        local_epochs=1,
        batch_size=12,
        lr=0.1,
        device="cpu",
    )
    own = result.runs[0]["final"]["own_client"]
    each = ", ".join(f"{name} {score:.0f}" for name, score in zip(LANGUAGES, own["per_client"].values(), strict=True))
    print(f"{method}: {own['accuracy']:.0f} % of the clients' own sentences ({each})")
