"""Chapter 12: the networks."""

from torch import nn


class Bert(nn.Module):
    """BERT base (Devlin et al. 2018) with logits for all tokens, as in its pre-training.

    It maps tokens (b, length) to logits (b, length, vocabulary).
    """

    def __init__(self, width=768, vocabulary=30_528):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

    def forward(self, tokens):
        return self.layers(self.embedding(tokens)) @ self.embedding.weight.T


def convnet():
    """Build the network whose training steps chapter 12 counts: (b, 1, 28, 28) to (b, 10)."""
    net = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=3, padding=1),  # (b, 16, 9, 9)
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),  # (b, 32, 5, 5)
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(800, 10),
    )
    for p in net.parameters():
        if p.dim() > 1:
            nn.init.kaiming_normal_(p, nonlinearity="relu")
        else:
            nn.init.zeros_(p)
    return net
