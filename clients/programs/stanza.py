"""A character language model with its trainer, a tokenizer, and the pairs of layers of `HighwayLSTM`."""

import tempfile
from pathlib import Path

import torch
from stanza.models.common.char_model import CharacterLanguageModelTrainer
from stanza.models.common.hlstm import HighwayLSTM
from stanza.models.common.vocab import CharVocab
from stanza.models.tokenization.model import Tokenizer
from torch import nn

import gatewise
from clients.trial import Trial

SETTINGS = {
    "char_emb_dim": 8,
    "char_hidden_dim": 16,
    "char_num_layers": 2,
    "char_dropout": 0.1,
    "char_rec_dropout": 0.0,
    "direction": "forward",
    "device": "cpu",
    "lr0": 1.0,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "anneal": 0.25,
    "patience": 1,
}
TOKENIZER = {
    "feat_dim": 3,
    "rnn_layers": 1,
    "conv_res": None,
    "use_mwt": True,
    "hierarchical": True,
    "hier_invtemp": 0.5,
    "tok_noise": 0.02,
}


def step(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    trial.compare("losses", loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


with Trial("stanza", "gatewise.accelerate(model)") as trial, tempfile.TemporaryDirectory() as folder:
    vocabulary = {"char": CharVocab([sorted("abcdefgh \n")])}
    trainer = CharacterLanguageModelTrainer.from_new_model(SETTINGS, vocabulary)
    tokenizer = Tokenizer(TOKENIZER, len(vocabulary["char"]), 8, 12, dropout=0.2, feat_dropout=0.05)
    highway = HighwayLSTM(8, 12, num_layers=2, batch_first=True, bidirectional=True, rec_dropout=0.0)
    if trial.gatewise:
        for model in (trainer.model, tokenizer, highway):
            gatewise.accelerate(model)

    lengths = [20, 17, 9, 4]
    letters = torch.randint(4, len(vocabulary["char"]), (4, 20))
    hidden = None
    for _ in range(4):
        output, hidden, decoded = trainer.model(letters, lengths, hidden)
        hidden = tuple(state.detach() for state in hidden)
        step(trainer.criterion(decoded[:, :-1].flatten(0, 1), letters[:, 1:].flatten()), trainer.optimizer)
    file = str(Path(folder) / "model.pt")
    trainer.save(file)
    loaded = CharacterLanguageModelTrainer.load(SETTINGS, file)
    words = [["abc", "de"], ["gh", "ab", "c"]]
    trainer.model.eval()
    answers = [torch.cat(model.build_char_representation(words)) for model in (trainer.model, loaded.model)]
    trial.saved("CharacterLanguageModelTrainer.save, load", *answers, loaded.model)

    optimizer = torch.optim.Adam(tokenizer.parameters(), 0.01)
    kinds = torch.randint(5, (4, 20))
    for _ in range(4):
        scores = tokenizer(letters, torch.zeros(4, 20, 3), lengths)
        step(nn.functional.nll_loss(scores.flatten(0, 1), kinds.flatten()), optimizer)

    optimizer = torch.optim.Adam(highway.parameters(), 0.01)
    x = torch.randn(4, 20, 8)
    for _ in range(4):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        found, _ = highway(packed, lengths)
        step(found.data.pow(2).mean(), optimizer)
