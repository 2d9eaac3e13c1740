"""`gatewise train nmt`: train an encoder-decoder with attention that translates."""

from __future__ import annotations

from typing import Annotated

import typer

from gatewise.cli import run_options
from gatewise.cli.run_options import MODEL, RUN, TRAINING

_DATA = "Data"


def nmt(
    recipe: run_options.Recipe = None,
    settings: run_options.Settings = None,
    output: run_options.Output = None,
    resume: run_options.Resume = False,
    overwrite: run_options.Overwrite = False,
    device: run_options.Device = None,
    threads: run_options.Threads = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="With train, valid and test .de and .en files.", rich_help_panel=_DATA),
    ] = None,
    train_source: Annotated[
        str | None,
        typer.Option("--train-source", metavar="FILE", help="Sentences, one a line, UTF-8.", rich_help_panel=_DATA),
    ] = None,
    train_target: Annotated[
        str | None, typer.Option("--train-target", metavar="FILE", help="Their translations.", rich_help_panel=_DATA)
    ] = None,
    valid_source: Annotated[
        str | None, typer.Option("--valid-source", metavar="FILE", help="Validation sentences.", rich_help_panel=_DATA)
    ] = None,
    valid_target: Annotated[
        str | None, typer.Option("--valid-target", metavar="FILE", help="Their translations.", rich_help_panel=_DATA)
    ] = None,
    test_source: Annotated[
        str | None, typer.Option("--test-source", metavar="FILE", help="Test sentences.", rich_help_panel=_DATA)
    ] = None,
    test_target: Annotated[
        str | None, typer.Option("--test-target", metavar="FILE", help="Their translations.", rich_help_panel=_DATA)
    ] = None,
    source_language: Annotated[
        str | None, typer.Option("--from", help="Language, default: de.", rich_help_panel=_DATA)
    ] = None,
    target_language: Annotated[
        str | None, typer.Option("--to", help="Language, default: en; phrases: iso too.", rich_help_panel=_DATA)
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="bpe, word, character or byte.", rich_help_panel=_DATA)] = None,
    vocabulary: Annotated[str | None, typer.Option(help="separate or joint.", rich_help_panel=_DATA)] = None,
    vocabulary_size: Annotated[
        int | None, typer.Option(help="Most tokens of a side; 0: all.", rich_help_panel=_DATA)
    ] = None,
    longest: Annotated[
        int | None, typer.Option(help="Most tokens of a training sentence.", rich_help_panel=_DATA)
    ] = None,
    ratio: Annotated[
        float | None, typer.Option(help="Most tokens for one of the other side.", rich_help_panel=_DATA)
    ] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens in a batch.", rich_help_panel=_DATA)] = None,
    embedding_size: Annotated[int | None, typer.Option(help="Size of embeddings.", rich_help_panel=MODEL)] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Units a layer.", rich_help_panel=MODEL)] = None,
    encoder_layers: Annotated[int | None, typer.Option(help="Layers that read.", rich_help_panel=MODEL)] = None,
    decoder_layers: Annotated[int | None, typer.Option(help="Layers that write.", rich_help_panel=MODEL)] = None,
    score: Annotated[str | None, typer.Option(help="additive, dot or general.", rich_help_panel=MODEL)] = None,
    input_feeding: Annotated[
        bool | None, typer.Option(help="Read the last attention; default.", rich_help_panel=MODEL)
    ] = None,
    dropout: Annotated[float | None, typer.Option(help="The two dropouts at once.", rich_help_panel=MODEL)] = None,
    tied: Annotated[str | None, typer.Option(help="none, target or all embeddings.", rich_help_panel=MODEL)] = None,
    label_smoothing: Annotated[
        float | None, typer.Option(help="Spread over all tokens.", rich_help_panel=MODEL)
    ] = None,
    kernel: run_options.Kernel = None,
    attention_kernel: Annotated[str | None, typer.Option(help="The same of attention.", rich_help_panel=MODEL)] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the pairs.", rich_help_panel=TRAINING)] = None,
    patience: run_options.Patience = None,
    optimizer: run_options.Optimizer = None,
    learning_rate: run_options.LearningRate = None,
    schedule: run_options.Schedule = None,
    clip: run_options.Clip = None,
    average: Annotated[str | None, typer.Option(help="none, ema, tail or last.", rich_help_panel=TRAINING)] = None,
    precision: run_options.Precision = None,
    cuda_graph: run_options.CudaGraph = None,
    memory_budget: run_options.MemoryBudget = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, dropout and batches.", rich_help_panel=TRAINING)] = None,
    beam_size: Annotated[int | None, typer.Option(help="Beams for the test set.", rich_help_panel=RUN)] = None,
) -> None:
    """Train an LSTM encoder and decoder with attention that translates.

    Without any option it learns to write German dates and amounts in English, within two minutes.

    Line n of one file is the translation of line n of the other. Two files are divided; or give all six.

    \b
    Examples:
      gatewise train nmt
      gatewise train nmt --from fr --to iso
      gatewise train nmt --train-source news.de --train-target news.en
      gatewise train nmt --recipe recipes/phrases.toml --set epochs=4
      gatewise train nmt --memory-budget 8GB
      gatewise train nmt --output runs/nmt --resume
      gatewise translate --checkpoint runs/nmt
    """  # noqa: D301 - \b keeps the lines of the examples apart
    from gatewise.cli.launch import launch
    from gatewise.cli.nmt_run import TRANSLATION

    flags = {
        "threads": threads,
        "memory_budget": memory_budget,
        "data.folder": data,
        "data.train_source": train_source,
        "data.train_target": train_target,
        "data.valid_source": valid_source,
        "data.valid_target": valid_target,
        "data.test_source": test_source,
        "data.test_target": test_target,
        "data.source_language": source_language,
        "data.target_language": target_language,
        "data.tokens": tokens,
        "data.vocabulary": vocabulary,
        "data.vocabulary_size": vocabulary_size,
        "data.longest": longest,
        "data.ratio": ratio,
        "data.batch_tokens": batch_tokens,
        "model.embedding_size": embedding_size,
        "model.hidden_size": hidden_size,
        "model.encoder_layers": encoder_layers,
        "model.decoder_layers": decoder_layers,
        "model.score": score,
        "model.input_feeding": input_feeding,
        "model.dropout": dropout,
        "model.layer_dropout": dropout,
        "model.tied": tied,
        "model.label_smoothing": label_smoothing,
        "model.kernel": kernel,
        "model.attention_kernel": attention_kernel,
        "training.epochs": epochs,
        "training.patience": patience,
        "training.optimizer": optimizer,
        "training.learning_rate": learning_rate,
        "training.schedule": schedule,
        "training.clip": clip,
        "training.average": average,
        "training.precision": precision,
        "training.cuda_graph": cuda_graph,
        "training.seed": seed,
        "translation.beam_size": beam_size,
    }
    launch(TRANSLATION, recipe, flags, settings or [], output, resume, overwrite, device)
