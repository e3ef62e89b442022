"""A small recurrent network on texts, with BatchNorm on what it makes of them."""

from __future__ import annotations

from torch import Tensor, nn

from fednorm.errors import ConfigError
from fednorm.models.calling import check_positive
from fednorm.models.registry import register_model


class TextLSTM(nn.Module):
    """Embeddings, an LSTM in both directions, the mean over all words but padding (token 0), BatchNorm, linear."""

    def __init__(self, num_classes: int, vocabulary: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        between = dropout if depth > 1 else 0.0  # torch warns where there is nothing in between
        self.lstm = nn.LSTM(width, width, depth, batch_first=True, dropout=between, bidirectional=True)
        self.norm = nn.BatchNorm1d(2 * width)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.is_floating_point() or tokens.dim() != 2:
            raise ConfigError(
                f"model 'text_lstm' takes texts as rows of whole numbers, 0 for padding; the data is {tokens.dtype} "
                f"of shape {tuple(tokens.shape[1:])} an example"
            )
        words = (tokens != 0).unsqueeze(-1)
        read = self.lstm(self.embed(tokens))[0] * words
        return self.head(self.drop(self.norm(read.sum(1) / words.sum(1).clamp_min(1))))


@register_model(
    "text_lstm",
    summary="embeddings, a bidirectional LSTM, BatchNorm1d; options vocabulary, width, depth, dropout",
    paper="this project's own",
    inputs="tokens",
)
def text_lstm(
    num_classes: int, vocabulary: int = 1000, width: int = 32, depth: int = 1, dropout: float = 0.1
) -> nn.Module:
    for what, value in {"vocabulary": vocabulary, "width": width, "depth": depth}.items():
        check_positive(what, value)
    if not 0 <= dropout < 1:
        raise ConfigError(f"model 'text_lstm': dropout={dropout!r} is no share; give a number from 0 to below 1")
    return TextLSTM(num_classes, vocabulary, width, depth, dropout)
