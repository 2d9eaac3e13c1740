"""A character language model, and a tagger with characters' embeddings, a bidirectional LSTM and a CRF."""

import tempfile
from pathlib import Path

import flair
import torch
from flair.data import Corpus, Dictionary, Sentence
from flair.datasets import FlairDatapointDataset
from flair.embeddings import CharacterEmbeddings, FlairEmbeddings, StackedEmbeddings
from flair.models import LanguageModel, SequenceTagger
from flair.trainers import ModelTrainer

import gatewise
from clients.trial import Trial

LETTERS = "abcdefgh "


def characters() -> Dictionary:
    dictionary = Dictionary()
    for letter in LETTERS + "\n":
        dictionary.add_item(letter)
    return dictionary


def sentence() -> Sentence:
    words = ["".join(LETTERS[i] for i in torch.randint(8, (int(length),))) for length in torch.randint(1, 7, (6,))]
    made = Sentence(words, use_tokenizer=False)
    for token in made:
        token.add_label("kind", "long" if len(token.text) > 3 else "short")
    return made


with Trial("flair", "gatewise.accelerate(model)") as trial, tempfile.TemporaryDirectory() as folder:
    flair.set_seed(0)
    language_model = LanguageModel(characters(), is_forward_lm=True, hidden_size=16, nlayers=2, embedding_size=8)
    if trial.gatewise:
        gatewise.accelerate(language_model)
    optimizer = torch.optim.SGD(language_model.parameters(), 2.0)
    text = torch.randint(len(LETTERS), (40, 4))
    hidden = language_model.init_hidden(4)
    for start in range(0, 36, 12):  # truncated backpropagation, as in flair's own trainer
        hidden = tuple(state.detach() for state in hidden)
        output, _, hidden = language_model(text[start : start + 12], hidden)
        loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), text[start + 1 : start + 13].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trial.compare("losses", loss)
    file = Path(folder) / "language_model.pt"
    language_model.save(file)
    loaded_model = LanguageModel.load_language_model(file)
    strings = ["abc de", "gh ab"]
    with torch.no_grad():
        answers = [each.eval().get_representation(strings, "\n", " ") for each in (language_model, loaded_model)]
    trial.saved("LanguageModel.save, load_language_model", *answers, loaded_model)

    corpus = Corpus(*(FlairDatapointDataset([sentence() for _ in range(count)]) for count in (24, 8, 8)))
    embeddings = StackedEmbeddings([CharacterEmbeddings(characters(), 6, 6), FlairEmbeddings(language_model)])
    tags = corpus.make_label_dictionary("kind", add_unk=False)
    tagger = SequenceTagger(embeddings, tags, "kind", hidden_size=12, rnn_layers=2)
    if trial.gatewise:
        gatewise.accelerate(tagger)
    ModelTrainer(tagger, corpus).train(
        Path(folder) / "run", learning_rate=0.1, mini_batch_size=8, max_epochs=2, shuffle=False
    )
    lines = (Path(folder) / "run" / "loss.tsv").read_text().splitlines()
    columns = lines[0].split("\t")
    trial.compare("losses", [float(line.split("\t")[columns.index("TRAIN_LOSS")]) for line in lines[1:]])
    trial.compare("weights", torch.cat([weight.flatten() for weight in tagger.rnn.parameters()]))
    loaded = SequenceTagger.load(Path(folder) / "run" / "final-model.pt")
    sentences = [sentence() for _ in range(4)]
    with torch.no_grad():
        answers = [each.eval()._prepare_tensors(sentences)[0] for each in (tagger, loaded)]
        trial.saved("SequenceTagger.save, load", *answers, loaded)
