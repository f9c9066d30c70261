"""`hetjax report`: a dumped run as one page, or as text that diffs."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hetjax.ir.errors import HetjaxError


@click.command()
@click.argument(
    "folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "-o",
    "--output",
    "out",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder to write to; with --plain, standard output when left out.",
)
@click.option("--plain", is_flag=True, help="Text that diffs: the same run gives the same bytes.")
@click.option(
    "--measured",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A trace with a measured run, to stand below the predicted one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def report(
    folder: Path, out: Path | None, plain: bool, measured: Path | None, as_json: bool
) -> int:
    """Write what is known of the run dumped in DIR: stages, timeline, memory, shardings, cluster, passes.

    DIR is what hetjax opt --dump DIR or a run with HETJAX_DUMP=DIR left. The page needs no network and no
    script; of several steps planned, index.html lists a page each.

    \b
    HETJAX_DUMP=dump python train.py
    hetjax report dump -o out
    """
    if out is None and (not plain or as_json):
        raise click.UsageError("give the folder to write to with -o DIR; only --plain prints")
    try:
        from hetjax.emit.chrome import read_trace
        from hetjax.notebook.dumps import read_dumps
        from hetjax.notebook.report import build_report, write_report

        timeline = read_trace(measured, "measured") if measured is not None else None
        if out is None:
            dumps = read_dumps(folder)
            texts = [build_report(d, timeline if d is dumps[-1] else None).text() for d in dumps]
            click.echo("\n".join(texts), nl=False)
            return 0
        files, facts = write_report(folder, out, plain=plain, measured=timeline)
    except HetjaxError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "error": str(error)}))
        return 1
    if as_json:
        click.echo(json.dumps({"ok": True, "files": [str(f) for f in files], "runs": facts}))
        return 0
    for path in files:
        click.echo(str(path))
    return 0
