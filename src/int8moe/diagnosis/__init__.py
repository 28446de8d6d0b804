"""What ``int8moe doctor`` looks at: one module a check, each a function that returns findings as data.

Code of plugins, of torch and of kernels runs in processes of its own (:mod:`.probes`), so that a crash is a finding.
:func:`int8moe.diagnosis.examination.examine` runs all of it.
"""
