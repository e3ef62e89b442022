"""FedRevive's server step (Askin et al. 2025, arXiv 2511.00655), after the authors' code.

`reviser` is what the server's half calls; `server_step` has the parts of it, `recall` what outlives a version. All
other files are functions of tensors: images (`generator`, `synthesis`, `pool`), losses and their guard (`features`,
`losses`, `guard`), teachers and what they teach (`teachers`, `distil`), the classifier as all of them run it
(`network`).
"""
