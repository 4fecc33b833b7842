"""A look over files of any modality before they are trained on: copies, leaks, labels, broken."""

from dataclasses import replace
from typing import Any

from regard.errors import UsageError
from regard.examine.report import USUAL, DataReport, compare_items, wording_of
from regard.modalities.base import ExamineOptions, Modality, plural


def examine_files(data: str, inputs: Modality[Any], given: ExamineOptions = USUAL) -> DataReport:
    """Look over all parts of a set of files and report what is wrong, where, and the remedy."""
    readers, shares = inputs.parts(data, given)
    if not readers:
        raise UsageError(f"{data}: no train, valid or test part in it; name a folder of it")
    report, parts = DataReport(data), {}
    for name in (part for part in ("train", "valid", "test") if part in readers):
        files = readers[name]()
        try:
            survey = inputs.survey(name, files, given)
        except UsageError as error:
            report.refused(str(files), error)
            continue
        report.add_notes(data, survey.notes, "broken=skip")
        if bad := survey.bad:
            what = f"{plural(len(bad), 'file')} of {name} cannot be read; the first: {bad[0]}"
            remedy = "repair or remove them, or leave them out with broken=skip"
            report.add("error", "broken", data, what, remedy, len(bad))
        if not survey.items:
            what = f"no {inputs.one} of {name} can be read"
            report.add("error", f"no_{inputs.many}", data, what, f"give {inputs.many} that open")
            continue
        report.parts[name] = survey.counts
        report.findings += [replace(one, where=one.where or data) for one in survey.findings]
        parts[name] = survey
    report.findings += inputs.compare(data, parts)
    items = {name: survey.items for name, survey in parts.items()}
    few = inputs.few if given.target == "label" else 0
    compare_items(report, items, wording_of(inputs, given.target), few)
    if "train" in parts:
        report.sample = parts["train"].sample
    return report.close((*readers, *shares))
