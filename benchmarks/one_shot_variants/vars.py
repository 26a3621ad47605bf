VARS={"own":(T["own"],{},[]),"rot":(T["new"],{},[]),
"spread":(T["new"],{},[("owner = unit / EACH;","owner = unit % PARTS;"),("(part * EACH + unit - owner * EACH) * UNIT_BYTES + lane * 16","(part * EACH + unit / PARTS) * UNIT_BYTES + lane * 16"),
 ("const int units = min(max(UNITS - part * EACH, 0), EACH);","const int units = (UNITS - part + PARTS - 1) / PARTS;"),("i < EACH && part * EACH + i < UNITS;","i < EACH && i * PARTS + part < UNITS;"),("const int unit = part * EACH + i,","const int unit = i * PARTS + part,")]),
}
