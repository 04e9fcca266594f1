"""What a run will do and cost, worked out before it: nothing is trained, nothing is written.

For people about to start a run, and for scripts that refuse a bad one early. Start reading at
`pretraining`: the plan has resolved and refused; it builds its parts and adds sizes, memory and
order, `estimate` times a step, `outcome` shows what was found.
"""
